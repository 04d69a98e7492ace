"""`checkpoints-tools inspect`: print what a checkpoint holds."""

import argparse
import sys

from checkpoints_tools.commands import options


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "inspect",
        help="print what a checkpoint holds",
        description="Names, shapes, dtypes and sizes, from headers; --scales reads the FP8 scales.",
    )
    options.add_source(parser, "Hugging Face or Megatron directory")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--scales", action="store_true", help="read FP8 scales: their range")
    options.add_hf_config(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    import json

    from checkpoints_tools.codes import codes_of
    from checkpoints_tools.opening import open_source
    from checkpoints_tools.summary import summarise, table

    source = open_source(arguments.source, arguments.hf_config)
    try:
        source = codes_of(source)
    except ValueError as error:  # they cannot be served, but the values can be looked at
        print(f"FP8 codes are shown as values: {error}", file=sys.stderr)
    summary = summarise(source, with_scales=arguments.scales)
    print(json.dumps(summary, indent=1) if arguments.json else "\n".join(table(summary)))
