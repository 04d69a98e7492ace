"""`checkpoints-tools quantize`: write a Hugging Face model with block-FP8 weights for vLLM."""

import argparse

from checkpoints_tools.commands import options


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "quantize",
        help="write a Hugging Face model with block-FP8 weights for vLLM",
        description="Quantise a Hugging Face model as the policy of a run is quantised.",
    )
    options.add_source(parser, "Hugging Face directory")
    options.add_target(parser)
    options.add_flow(parser)
    options.add_writing(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    from checkpoints_tools.commands.writing import write_served
    from checkpoints_tools.hf import HFReader
    from checkpoints_tools.opening import refuse_quantised

    source = HFReader(arguments.source)
    refuse_quantised(source, "quantize")
    write_served(arguments, source)
