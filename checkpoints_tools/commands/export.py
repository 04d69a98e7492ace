"""`checkpoints-tools export`: write a Megatron checkpoint as a Hugging Face or vLLM-FP8 model."""

import argparse

from checkpoints_tools.commands import options


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "export",
        help="write a Megatron checkpoint as a Hugging Face or vLLM-FP8 model",
        description="Write the weights of a Megatron checkpoint, or of a step of a run "
        "(RUN/checkpoints/global_step_N).",
    )
    options.add_source(parser, "Megatron checkpoint")
    options.add_target(parser)
    parser.add_argument(
        "--format",
        choices=("hf", "vllm-fp8"),
        default="hf",
        help="values, or codes and scales as weight sync sends them (default: %(default)s)",
    )
    options.add_flow(parser)
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="for --format vllm-fp8: quantise anew the values of weights that are stored in FP8, "
        "instead of keeping their codes and scales",
    )
    options.add_dtype(parser, "dtype to round to (default: as stored); for --format hf")
    options.add_hf_config(parser)
    options.add_writing(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError: The checkpoint cannot be read, a format and a dtype exclude each other, or FP8
            codes cannot be kept.
    """
    from checkpoints_tools.codes import CodesSource, codes_of
    from checkpoints_tools.commands.writing import cast, write_hf, write_served
    from checkpoints_tools.locate import open_checkpoint
    from checkpoints_tools.pieces import model_pieces

    source = open_checkpoint(arguments.source, arguments.hf_config)
    if arguments.format == "hf":
        values = cast(source, arguments.dtype)
        write_hf(arguments, values, model_pieces(values), values.config)
        return
    if arguments.dtype:
        raise ValueError("--dtype is for --format hf; vllm-fp8 has the dtypes of its --flow.")
    codes = source if arguments.requantize else codes_of(source, tp_size=arguments.tp)
    if isinstance(codes, CodesSource):
        write_hf(arguments, codes, model_pieces(codes), codes.config, codes.notes)
    else:
        write_served(arguments, source)
