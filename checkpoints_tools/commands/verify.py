"""`checkpoints-tools verify`: compare two models, tensor by tensor, as bytes."""

import argparse
from pathlib import Path

from checkpoints_tools.commands import options


def add_parser(commands: options.Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "verify",
        help="compare two models, tensor by tensor, as bytes",
        description="Exit code 0: equal; 1: different; 2: one cannot be read. Formats may differ.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="Hugging Face or Megatron directory")
    parser.add_argument("b", type=Path, metavar="B", help="Hugging Face or Megatron directory")
    parser.add_argument(
        "--logits",
        action="store_true",
        help="also compare the logits of probe prompts, computed by transformers in FP32",
    )
    options.add_hf_config(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 0 when the models are equal, else 1."""
    from checkpoints_tools.compare import compare
    from checkpoints_tools.manifest import check_manifest
    from checkpoints_tools.opening import is_hugging_face, open_source

    sources = []
    for path in (arguments.a, arguments.b):
        is_hf = is_hugging_face(path)
        sources.append(open_source(path, None if is_hf else arguments.hf_config))
        if is_hf and check_manifest(path):
            print(f"{path}: checksums hold")
    result = compare(*sources)
    print(result.text())
    if not arguments.logits:
        return 0 if result.is_equal else 1
    from checkpoints_tools.logits import compare_logits

    logits = compare_logits(*sources)
    print(logits.text())
    return 0 if result.is_equal and logits.is_equal else 1
