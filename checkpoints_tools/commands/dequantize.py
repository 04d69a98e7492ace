"""`checkpoints-tools dequantize`: write an FP8 model with BF16 weights."""

import argparse

from checkpoints_tools.commands import options


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "dequantize",
        help="write an FP8 model with BF16 weights",
        description="Multiply FP8 codes by their scales: block, per tensor or per channel; "
        "those of compressed-tensors, too.",
    )
    options.add_source(parser, "Hugging Face directory with FP8 weights")
    options.add_target(parser)
    options.add_dtype(parser, "dtype of the values (default: %(default)s)", "bfloat16")
    options.add_writing(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    import torch

    from checkpoints_tools.commands.writing import write_hf
    from checkpoints_tools.dequantize import DequantizedSource
    from checkpoints_tools.hf import HFReader
    from checkpoints_tools.pieces import model_pieces

    source = DequantizedSource(HFReader(arguments.source), getattr(torch, arguments.dtype))
    write_hf(arguments, source, model_pieces(source), source.config)
