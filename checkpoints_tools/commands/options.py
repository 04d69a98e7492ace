"""Options that several commands share."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Declare `--overwrite`."""
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is taken")
