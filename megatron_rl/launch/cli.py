"""The command line ``megatron-rl``. Parsing and validation import nothing heavy."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl import __version__
from megatron_rl.config import ConfigError, dump_config, load_config
from megatron_rl.launch.contract import check_formats
from megatron_rl.launch.execute import execute
from megatron_rl.launch.inference import add_eval_parser, add_generate_parser
from megatron_rl.launch.precision import add_precision_parser
from megatron_rl.launch.sft import add_sft_parser
from megatron_rl.precision import flow_of

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0 done, 1 the run failed, 2 the input is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ConfigError, ValueError) as error:
        print(f"megatron-rl: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("megatron-rl: interrupted; start the same command again to resume", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        description="Reinforcement-learning post-training in one precision flow.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy with reinforcement learning")
    train.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    train.add_argument("--dry-run", action="store_true", help="validate, print, do not train")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    train.set_defaults(run=_train)

    add_sft_parser(commands)
    add_eval_parser(commands)
    add_generate_parser(commands)

    report = commands.add_parser("report", help="build the report of a run, or compare several")
    report.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    report.add_argument("--output", type=Path, help="file of a comparison of several runs")
    report.set_defaults(run=_report)

    add_precision_parser(commands)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    check_formats(config)
    if arguments.dry_run:
        print(dump_config(config), end="")
        print(f"# flow: {flow_of(config.precision).short_str()}")
        return 0
    return execute(config, _run_training)


def _run_training() -> Callable[..., Path]:
    from megatron_rl.trainer.run import run_training

    return run_training


def _report(arguments: argparse.Namespace) -> int:
    from megatron_rl.report import build_comparison, build_report

    if len(arguments.run_dirs) == 1:
        print(build_report(arguments.run_dirs[0]))
    else:
        print(build_comparison(arguments.run_dirs, arguments.output or Path("comparison.html")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
