"""The command ``megatron-rl sft``: supervised fine-tuning on prompt-response rows."""

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import apply_overrides, dump_config, read_yaml, validate
from megatron_rl.config.sft import SFTConfig
from megatron_rl.launch.contract import check_formats
from megatron_rl.launch.execute import execute
from megatron_rl.precision import flow_of


def add_sft_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of ``megatron-rl``."""
    parser = commands.add_parser("sft", help="fine-tune a model on prompt-response rows")
    parser.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    parser.add_argument("--dry-run", action="store_true", help="validate, print, do not train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.set_defaults(run=_sft)


def _sft(arguments: argparse.Namespace) -> int:
    tree = apply_overrides(read_yaml(arguments.config), arguments.overrides)
    config = validate(tree, SFTConfig)
    check_formats(config)
    if arguments.dry_run:
        print(dump_config(config), end="")
        print(f"# flow: {flow_of(config.precision).short_str()}")
        return 0
    return execute(config, _run_fine_tuning)


def _run_fine_tuning() -> Callable[..., Path]:
    from megatron_rl.trainer.run import run_fine_tuning

    return run_fine_tuning
