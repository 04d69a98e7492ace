"""`checkpoints-tools tiny`: a random model for tests and dry runs."""

import argparse
from pathlib import Path

from checkpoints_tools.commands.options import Commands, add_overwrite

SIZES = {
    "num_layers": "decoder layers",
    "hidden_size": "width of the residual stream",
    "num_attention_heads": "query heads",
    "num_query_groups": "key/value heads",
    "head_dim": "width of a head",
    "ffn_hidden_size": "width of the feed-forward layer",
    "num_experts": "experts of a layer, in families that have any",
    "vocab_size": "rows of the embedding",
    "max_position_embeddings": "context length in tokens",
    "seed": "seed of the weights",
}
OPTIONS = ("family", *SIZES, "tie_word_embeddings", "overwrite")


def add_parser(commands: Commands) -> None:
    """Declare the arguments."""
    parser = commands.add_parser(
        "tiny",
        help="write a tiny random model",
        description="Write a random model with a byte tokenizer as a Hugging Face directory, for "
        "tests and dry runs. What is not given is as in checkpoints_tools.tiny.write_tiny_model.",
    )
    parser.add_argument("--family", default="llama", help="model family (default: %(default)s)")
    for name, meaning in SIZES.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, metavar="N", default=argparse.SUPPRESS, help=meaning)
    parser.add_argument(
        "--tie-word-embeddings",
        action="store_true",
        default=argparse.SUPPRESS,
        help="use the embedding as output head",
    )
    add_overwrite(parser)
    parser.add_argument("target", type=Path, metavar="TARGET", help="directory to make")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    from checkpoints_tools.tiny import write_tiny_model

    options = {key: value for key, value in vars(arguments).items() if key in OPTIONS}
    wrong = [name for name in SIZES if name != "seed" and options.get(name, 1) < 1]
    if wrong:
        option = wrong[0].replace("_", "-")
        raise ValueError(f"--{option} is {options[wrong[0]]}; give 1 or more")
    print(write_tiny_model(arguments.target, **options))
