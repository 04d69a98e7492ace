"""``megatron-rl precision compare`` and ``attribute``: flows measured against each other.

``compare`` trains the same recipe once a flow - same prompts, seeds and starting weights, each run
in a process of its own - and puts the results into one table and one page of curves. ``attribute``
trains nothing: it switches the shared operators off one by one.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.config import ConfigError, load_config
from megatron_rl.launch.inference import run_quietly
from megatron_rl.metrics import read_metrics
from megatron_rl.precision import flow_names, resolve_flow

PLAIN = ":plain"
"""Suffix of a flow whose operators are not shared (``precision.exact=false``)."""
TAIL_SHARE = 0.25
"""Share of the steps, at the end, whose mean reward stands for the result."""
COLUMNS = (
    ("reward, last quarter", "{reward:.3f}"),
    ("held-out before", "{before}"),
    ("held-out after", "{after}"),
    ("mean abs dlogp", "{mean:.2e}"),
    ("max abs dlogp", "{largest:.2e}"),
    ("k3", "{k3:.2e}"),
    ("mean abs dprob", "{probs:.2e}"),
    ("tokens equal", "{exact:.1%}"),
    ("rollout s", "{gen:.2f}"),
    ("update s", "{update:.2f}"),
    ("sync s", "{sync:.2f}"),
    ("step s", "{step:.2f}"),
)


def add_measuring_commands(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds ``compare`` and ``attribute`` to ``megatron-rl precision``."""
    compare = actions.add_parser("compare", help="train a recipe in several flows, side by side")
    compare.add_argument(
        "--flows",
        required=True,
        help=f"comma-separated, of {', '.join(flow_names())}; a flow with {PLAIN} shares no "
        "operators with rollout",
    )
    compare.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    compare.add_argument("--steps", type=int, help="training steps of each run")
    compare.add_argument(
        "--output", type=Path, default=Path("runs/compare"), help="directory of the runs"
    )
    compare.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    compare.set_defaults(run=_compare)

    attribute = actions.add_parser(
        "attribute", help="the mismatch with each shared operator switched back to plain torch"
    )
    attribute.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    attribute.add_argument("--prompts", type=int, default=16, help="prompts that are sampled")
    attribute.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    attribute.set_defaults(run=_attribute)


def _compare(arguments: argparse.Namespace) -> int:
    flows = [flow.strip() for flow in arguments.flows.split(",") if flow.strip()]
    for flow in flows:
        resolve_flow(flow.removesuffix(PLAIN))
    if len(set(flows)) != len(flows) or not flows:
        raise ConfigError(f"--flows={arguments.flows!r} must name each flow once")
    load_config(arguments.config, arguments.overrides)
    run_dirs = {}
    for flow in flows:
        name = flow.replace(":", "-")
        run_dirs[flow] = arguments.output / name
        if run_dirs[flow].exists():
            raise ConfigError(
                f"{run_dirs[flow]} exists, and a comparison starts afresh; choose another --output"
            )
    for flow in flows:
        print(f"== {flow}", flush=True)
        result = subprocess.run(_command(arguments, flow, run_dirs[flow]))
        if result.returncode:
            print(f"megatron-rl: the run of {flow} failed", file=sys.stderr)
            return result.returncode
    table = markdown_table(run_dirs)
    (arguments.output / "table.md").write_text(table)
    print(table)
    from megatron_rl.report import build_comparison

    print(build_comparison(list(run_dirs.values()), arguments.output / "comparison.html"))
    return 0


def _command(arguments: argparse.Namespace, flow: str, run_dir: Path) -> list[str]:
    forced = [
        f"name={run_dir.name}",
        f"output_dir={run_dir.parent}",
        f"precision.flow={flow.removesuffix(PLAIN)}",
        f"precision.exact={str(not flow.endswith(PLAIN)).lower()}",
        "precision.allow_mismatch=true",
        "trainer.save_interval_steps=0",
        "trainer.save_final_checkpoint=false",
        "trainer.export_hf=false",
        "trainer.resume_mode=disable",
    ]
    if arguments.steps:
        forced.append(f"trainer.total_steps={arguments.steps}")
    command = [sys.executable, "-m", "megatron_rl.launch.cli", "train", "--config"]
    return [*command, str(arguments.config), *arguments.overrides, *forced]


def markdown_table(run_dirs: dict[str, Path]) -> str:
    """One row a flow, from the runs' own metrics."""
    heads = ["flow", *(head for head, _ in COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for flow, run_dir in run_dirs.items():
        values = summarise_run(run_dir)
        cells = [template.format(**values) for _, template in COLUMNS]
        lines.append("| " + " | ".join([flow, *cells]) + " |")
    return "\n".join(lines) + "\n"


def summarise_run(run_dir: Path) -> dict[str, float | str]:
    """The figures of a row: means over the steps, but the largest of the largest."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_metrics(run_dir):
        steps.setdefault(line.step, {}).update(line.metrics)
    trained = [metrics for step, metrics in sorted(steps.items()) if step > 0]
    tail = trained[-max(1, round(len(trained) * TAIL_SHARE)) :]

    def mean(key: str, rows: list[dict[str, float]] = trained) -> float:
        found = [row[key] for row in rows if key in row]
        return sum(found) / len(found) if found else float("nan")

    return {
        "reward": mean("critic/rewards/mean", tail),
        "before": _held_out(steps.get(0, {})),
        "after": _held_out(steps[max(steps)]),
        "mean": mean("rollout_corr/logp_diff_abs_mean"),
        "largest": max(row["rollout_corr/logp_diff_abs_max"] for row in trained),
        "k3": mean("rollout_corr/k3_kl"),
        "probs": mean("training/rollout_probs_diff_mean"),
        "exact": mean("rollout_corr/exact_share"),
        "gen": mean("timing_s/gen"),
        "update": mean("timing_s/update_actor"),
        "sync": mean("timing_s/sync"),
        "step": mean("timing_s/step"),
    }


def _held_out(metrics: dict[str, float]) -> str:
    """Greedy held-out accuracy, or reward where there is no accuracy, mean over the sets."""
    for measure in ("acc", "reward"):
        ending = f"/{measure}/mean"
        found = [v for k, v in metrics.items() if k.startswith("val-core/") and k.endswith(ending)]
        if found:
            return f"{sum(found) / len(found):.3f}"
    return "-"


def _attribute(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)

    def work(model_path: Path, quiet: Callable[[], AbstractContextManager[None]]) -> Any:
        from megatron_rl.trainer.attribution import attribute

        return attribute(config, model_path, quiet, arguments.prompts)

    def show(rows: list[Any], console: TextIO) -> None:
        head = f"shared operators ({rows[0].num_tokens} tokens)"
        print(f"| {head} | mean abs dlogp | max abs dlogp | tokens equal |", file=console)
        print("|---|---|---|---|", file=console)
        for row in rows:
            values = f"{row.mean:.2e} | {row.largest:.2e} | {row.exact_share:.1%}"
            print(f"| {row.label} | {values} |", file=console)

    return run_quietly(config, work, show)
