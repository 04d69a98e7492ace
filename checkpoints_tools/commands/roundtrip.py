"""`checkpoints-tools roundtrip`: convert a model to Megatron and back, and compare every byte."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpoints_tools.commands import options


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "roundtrip",
        help="convert a model to Megatron and back, and compare every byte",
        description="Import a Hugging Face model into a temporary Megatron checkpoint, read it "
        "back, compare.",
    )
    options.add_source(parser, "Hugging Face directory")
    parser.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="where to write (default: the system's temporary directory); takes the model's size",
    )
    options.add_workers(parser)
    options.add_quiet(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 0 when every tensor came back bit for bit, else 1."""
    from checkpoints_tools.compare import compare
    from checkpoints_tools.hf import HFReader
    from checkpoints_tools.locate import open_checkpoint
    from checkpoints_tools.opening import refuse_quantised
    from checkpoints_tools.progress import Progress
    from checkpoints_tools.torch_dist import plan_checkpoint, write_directory

    source = HFReader(arguments.source)
    refuse_quantised(source, "roundtrip")
    plan = plan_checkpoint(source)
    with TemporaryDirectory(prefix="roundtrip.", dir=arguments.work_dir) as folder:
        target = Path(folder) / "megatron"
        with Progress("writing", plan.nbytes, quiet=arguments.quiet) as progress:
            write_directory(target, source, plan, workers=arguments.workers, on_bytes=progress)
        back = open_checkpoint(target)
        result = compare(source, back, names=back)
    print(result.text())
    return 0 if result.is_equal else 1
