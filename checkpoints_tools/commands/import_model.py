"""`checkpoints-tools import`: write a Hugging Face or GGUF model as a Megatron checkpoint."""

import argparse
from typing import TYPE_CHECKING

from checkpoints_tools.commands import options

if TYPE_CHECKING:
    from checkpoints_tools.source import TensorSource


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "import",
        help="write a Hugging Face or GGUF model as a Megatron checkpoint",
        description="Write a torch_dist directory, which loads at every parallel layout.",
    )
    options.add_source(parser, "Hugging Face directory or GGUF file")
    options.add_target(parser)
    options.add_dtype(parser, "dtype to round to (default: as stored)")
    options.add_writing(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from checkpoints_tools.hf import HFReader

    if arguments.source.suffix != ".gguf":
        _import(arguments, HFReader(arguments.source))
        return
    from checkpoints_tools.gguf import import_gguf

    parent = arguments.target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{arguments.target.name}.", dir=parent) as folder:
        _import(arguments, HFReader(import_gguf(arguments.source, Path(folder) / "hf")))


def _import(arguments: argparse.Namespace, source: "TensorSource") -> None:
    from checkpoints_tools.commands.writing import cast
    from checkpoints_tools.opening import refuse_quantised
    from checkpoints_tools.progress import Progress, format_bytes
    from checkpoints_tools.torch_dist import plan_checkpoint, write_directory

    refuse_quantised(source, "import")
    source = cast(source, arguments.dtype)
    plan = plan_checkpoint(source)
    if arguments.dry_run:
        size = format_bytes(plan.nbytes)
        print(f"{arguments.target}: {len(plan.shapes)} tensors, {size}")
        print("dry run: nothing was written")
        return
    with Progress(f"writing {arguments.target}", plan.nbytes, quiet=arguments.quiet) as progress:
        write_directory(
            arguments.target,
            source,
            plan,
            workers=arguments.workers,
            max_file_bytes=arguments.max_shard_bytes,
            overwrite=arguments.overwrite,
            on_bytes=progress,
        )
    print(arguments.target)
