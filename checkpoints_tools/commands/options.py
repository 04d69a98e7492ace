"""Options that several commands share."""

import argparse
import re
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Declare `--overwrite`."""
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is taken")


def add_source(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare the argument SOURCE."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help=what)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declare the argument TARGET."""
    parser.add_argument("target", type=Path, metavar="TARGET", help="directory to make")


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Declare what every command that writes a model takes."""
    add_overwrite(parser)
    parser.add_argument(
        "--max-shard-size",
        type=size_bytes,
        default=size_bytes("5GB"),
        metavar="SIZE",
        dest="max_shard_bytes",
        help="largest size of a weight file, such as 5GB, 500MB or 2GiB (default: 5GB)",
    )
    add_workers(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written, and write nothing"
    )
    add_quiet(parser)


def add_dtype(parser: argparse.ArgumentParser, help_text: str, default: str | None = None) -> None:
    """Declare `--dtype`."""
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default=default, help=help_text
    )


def add_hf_config(parser: argparse.ArgumentParser) -> None:
    """Declare `--hf-config`."""
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory with config and tokenizer of a Megatron checkpoint that has "
        "none itself",
    )


def add_flow(parser: argparse.ArgumentParser) -> None:
    """Declare what says how weights are quantised."""
    parser.add_argument(
        "--flow", default="fp8", help="precision flow that quantises (default: %(default)s)"
    )
    parser.add_argument(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="tensor-parallel size that the result must allow (default: %(default)s)",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Declare `--workers`."""
    parser.add_argument(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="threads; each writes one weight file at a time (default: %(default)s)",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Declare `--quiet`."""
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def size_bytes(text: str) -> int:
    """A size in bytes: `5GB`, `500MB`, `2GiB`, `1000`.

    Raises:
        argparse.ArgumentTypeError: It is none, or less than one byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    size = 0
    if found and found[2] in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; give one such as 5GB, 500MB or 2GiB"
        )
    return size


def positive(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)
