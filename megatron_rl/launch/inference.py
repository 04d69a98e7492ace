"""The commands ``megatron-rl eval`` and ``megatron-rl generate``: a policy without training.

Arguments and results only; :mod:`megatron_rl.trainer.inference` does the work, and is imported
after the environment is set.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.config import ConfigError, RunConfig, load_config
from megatron_rl.metrics.evaluations import EVALUATION_KEY
from megatron_rl.metrics.files import atomic_write, json_line
from megatron_rl.metrics.text import format_fixed, format_percent, visible
from megatron_rl.precision import flow_of

FAILED = 1
TABLE_WIDTH = 100


def add_eval_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``eval`` to the commands of ``megatron-rl``."""
    parser = commands.add_parser("eval", help="evaluate a policy on a recipe's held-out prompts")
    parser.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    parser.add_argument(
        "--checkpoint", type=Path, help="training checkpoint (global_step_N) of that recipe"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.set_defaults(run=_eval)


def add_generate_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds ``generate`` to the commands of ``megatron-rl``."""
    parser = commands.add_parser("generate", help="sample responses to prompts, as JSON lines")
    parser.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument(
        "--model", metavar="DIR", help="Hugging Face directory; by default the recipe's model.path"
    )
    policy.add_argument(
        "--checkpoint", type=Path, help="training checkpoint (global_step_N) of that recipe"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", nargs="+", action="extend", metavar="TEXT", help="prompts; may be repeated"
    )
    source.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL rows with `prompt`: text or messages"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put text prompts into the model's chat template"
    )
    parser.add_argument(
        # torchrun takes --n for an abbreviation of its own options, even after the module.
        "--n",
        "--num-samples",
        type=int,
        default=1,
        metavar="N",
        help="samples per prompt (default 1)",
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the recipe's")
    parser.add_argument("--max-tokens", type=int, help="longest response; default: the recipe's")
    parser.add_argument("--seed", type=int, help="seed of the call; default: the recipe's")
    parser.add_argument("--output", type=Path, help="JSONL file; default: standard output")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides, before --prompt"
    )
    parser.set_defaults(run=_generate)


def _eval(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    flow_of(config.precision)
    _check_output(arguments.output)

    def work(model_path: Path, quiet: Callable[[], AbstractContextManager[None]]) -> Any:
        from megatron_rl.trainer.inference import evaluate_model

        return evaluate_model(config, model_path, arguments.checkpoint, quiet)

    def show(result: dict[str, Any], console: TextIO) -> None:
        _print_metrics(result, console)
        if arguments.output is not None:
            atomic_write(arguments.output, json.dumps(result, indent=1) + "\n")
            print(f"written to {arguments.output}", file=console)

    return run_quietly(config, work, show)


def _generate(arguments: argparse.Namespace) -> int:
    overrides = list(arguments.overrides)
    for flag, key, value in (
        ("--model", "model.path", arguments.model),
        ("--max-tokens", "rollout.max_response_length_tokens", arguments.max_tokens),
    ):
        if value is not None:
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{flag} is {value} and must be at least 1")
            overrides.append(f"{key}={json.dumps(value)}")
    config = load_config(arguments.config, overrides)
    flow_of(config.precision)
    temperature = arguments.temperature
    if temperature is None:
        temperature = config.rollout.temperature
    seed = config.seed if arguments.seed is None else arguments.seed
    if arguments.n < 1:
        raise ConfigError(f"--n is {arguments.n} and must be at least 1")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature is {temperature} and must be 0 (greedy) or more")
    if seed < 0:
        raise ConfigError(f"--seed is {seed} and must be 0 or more")
    if "" in (arguments.prompt or ()):
        raise ConfigError("--prompt is empty; give it a text")
    _check_output(arguments.output)
    prompts: Any = arguments.prompt
    if prompts is None:
        from megatron_rl.data.rows import read_prompts

        prompts = read_prompts(arguments.prompts)

    def work(model_path: Path, quiet: Callable[[], AbstractContextManager[None]]) -> Any:
        from megatron_rl.trainer.inference import GenerationOptions, generate_responses

        options = GenerationOptions(
            n=arguments.n,
            temperature=temperature,
            seed=seed,
            use_chat_template=arguments.chat,
        )
        return generate_responses(config, model_path, arguments.checkpoint, prompts, options, quiet)

    def show(rows: list[dict[str, Any]], console: TextIO) -> None:
        lines = b"".join(json_line(row) for row in rows)
        if arguments.output is None:
            console.write(lines.decode("ascii"))
        else:
            atomic_write(arguments.output, lines)
            print(f"{len(rows)} responses written to {arguments.output}", file=console)

    return run_quietly(config, work, show)


def run_quietly(
    config: RunConfig,
    work: Callable[[Path, Callable[[], AbstractContextManager[None]]], Any],
    show: Callable[[Any, TextIO], None],
) -> int:
    """Does the work in a prepared environment and shows its result; returns the exit code.

    What third-party libraries print goes to a temporary file, which is kept when the work fails.
    """
    from megatron_rl.launch.environment import export_environment, run_environment
    from megatron_rl.launch.models import resolve_model
    from megatron_rl.launch.quiet import configure_logging, open_console, quiet

    export_environment(run_environment(flow_of(config.precision)))
    console = open_console()
    configure_logging()
    descriptor, name = tempfile.mkstemp(prefix="megatron-rl-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    try:
        with quiet(log):
            model_path = resolve_model(config.model.path)
        result = work(model_path, lambda: quiet(log))
        if result is not None:
            show(result, console)
    except (ValueError, KeyboardInterrupt):
        log.unlink()
        raise
    except OSError as error:
        print(f"megatron-rl: failed: {error}; what libraries printed: {log}", file=sys.stderr)
        return FAILED
    except Exception:
        print(f"megatron-rl: failed; what libraries printed: {log}", file=sys.stderr)
        raise
    log.unlink()
    return 0


def _check_output(output: Path | None) -> None:
    """Refuses a file that could not be written, before minutes of work.

    Raises:
        ValueError: Its folder does not exist, or it is a folder itself.
    """
    if output is None:
        return
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {output.parent} does not exist; make it")


def _print_metrics(result: dict[str, Any], console: TextIO) -> None:
    """The evaluation as a table: a held-out set, a measure and a decoding a row."""
    from rich.console import Console
    from rich.table import Table

    policy = result["model"]
    if result["checkpoint"] is not None:
        policy = f"{result['checkpoint']} (step {result['step']})"
    print(visible(f"{policy}, {result['num_prompts']} prompts, {result['flow']}"), file=console)
    table = Table()
    for name in ("set", "measure", "decoding"):
        table.add_column(name, overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for key, value in result["metrics"].items():
        match = EVALUATION_KEY.fullmatch(key)
        assert match, key
        is_accuracy = match["measure"] == "acc"
        table.add_row(
            visible(match["source"]),
            "exact match" if is_accuracy else "reward",
            f"mean@{match['samples']}" if match["samples"] else "greedy",
            format_percent(value) if is_accuracy else format_fixed(value, 3),
        )
    width = None if console.isatty() else TABLE_WIDTH
    Console(file=console, width=width, markup=False, highlight=False).print(table)
