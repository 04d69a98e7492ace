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
    from checkpoints_tools.commands.writing import write_hf
    from checkpoints_tools.hf import HFReader
    from checkpoints_tools.opening import refuse_quantised
    from checkpoints_tools.pieces import served_pieces
    from megatron_rl.precision import resolve_flow

    source = HFReader(arguments.source)
    refuse_quantised(source, "quantize")
    flow = resolve_flow(arguments.flow)
    pieces, config, plan = served_pieces(source, flow, tp_size=arguments.tp)
    write_hf(arguments, source, pieces, config, [f"{flow.name}: {plan.summary()}"])
