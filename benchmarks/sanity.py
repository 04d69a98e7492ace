"""The sanity test of reinforcement learning: a perfectible set is learned, in every flow and seed.

    python -m benchmarks.sanity                              # bf16, fp16, fp8; seeds 1, 2, 3
    python -m benchmarks.sanity --flows fp16 --seeds 1 --set trainer.total_steps=80

A tiny random model is half taught by supervision, once. Each run then learns by reinforcement the
prompts that it answers rightly 20 to 80 % of the time; it passes when the accuracy of the samples
that it trains on, over its last steps, is above 95 % (arXiv 2510.26788).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import ROOT, machine, markdown_table, write_markdown

RECIPES = ROOT / "scripts/recipes"
TINY = "--family qwen3 --hidden-size 256 --num-attention-heads 2 --num-query-groups 1".split()
TINY += "--head-dim 128 --ffn-hidden-size 512".split()
PASS_ACCURACY = 0.95
WINDOW_STEPS = 5
"""Steps at either end over which accuracy is averaged."""
HEADER = (
    "flow",
    "seed",
    "prompts",
    "first accuracy",
    "last accuracy",
    "passes",
    "steps to 95 %",
    "mean abs. difference of log-probs",
    "skipped steps",
    "s",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and prints the table; 1 when a run does not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flows", nargs="+", default=["bf16", "fp16", "fp8"], metavar="FLOW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--model", type=Path, help="fine-tuned model; made anew by default")
    parser.add_argument("--work-dir", type=Path, help="keeps models and runs; temporary by default")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sanity-") as temporary:
        folder = (arguments.work_dir or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        model = arguments.model or fine_tuned_model(folder)
        fine_tuned_s = time.monotonic() - begun
        rows, all_pass = [], True
        for flow in arguments.flows:
            for seed in arguments.seeds:
                row, passes = learn(folder, model.absolute(), flow, seed, arguments.set)
                rows.append(row)
                all_pass &= passes
    about = (
        f"{machine()}. Fine-tuning {fine_tuned_s:.0f} s, all runs "
        f"{time.monotonic() - begun - fine_tuned_s:.0f} s. Accuracies are of the samples trained "
        f"on, over the first and the last {WINDOW_STEPS} steps."
    )
    write_markdown(f"{about}\n\n{markdown_table(HEADER, rows)}", arguments.markdown)
    return 0 if all_pass else 1


def fine_tuned_model(folder: Path) -> Path:
    """Makes the tiny model and half teaches it."""
    tiny = folder / "tiny-128"
    command("checkpoints_tools.cli", "tiny", str(tiny), *TINY, "--overwrite")
    megatron_rl(
        "sft",
        "sft-tiny-128",
        f"model.path={tiny}",
        f"output_dir={folder}",
        "name=sft",
        "logging.report=false",
    )
    return folder / "sft" / "hf"


def learn(
    folder: Path, model: Path, flow: str, seed: int, overrides: Sequence[str]
) -> tuple[list[str], bool]:
    """One run: its line of the table, and whether it passes."""
    name = f"{flow}-{seed}"
    begun = time.monotonic()
    status = megatron_rl(
        "train",
        "sanity-tiny",
        f"model.path={model}",
        f"output_dir={folder}",
        f"name={name}",
        f"seed={seed}",
        f"precision.flow={flow}",
        "precision.allow_mismatch=true",
        "logging.report=false",
        *overrides,
        may_fail=True,
    )
    took_s = time.monotonic() - begun
    if status:
        return [flow, str(seed), "", "", "", f"**exit code {status}**", "", "", "", ""], False
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    kept = json.loads((folder / name / "perfectible.json").read_text())["kept"]
    steps = [json.loads(line)["metrics"] for line in lines]
    figures = summary([step for step in steps if "train/accuracy" in step])
    reached = figures["steps_to_pass"]
    row = [
        flow,
        str(seed),
        str(len(kept)),
        f"{figures['first']:.1%}",
        f"{figures['last']:.1%}",
        "yes" if figures["passes"] else "**no**",
        "never" if reached is None else str(reached),
        f"{figures['mismatch']:.1e}",
        f"{figures['skipped']:.0f}",
        f"{took_s:.0f}",
    ]
    print(" | ".join(row), file=sys.stderr, flush=True)
    return row, figures["passes"]


def summary(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Figures of a run from the metrics of its steps.

    Returns:
        ``first`` and ``last`` accuracy, ``passes``, ``steps_to_pass`` (the last step of the first
        window above the limit, or None), ``mismatch`` (mean absolute difference of log-probs, nats
        per token, over all steps) and ``skipped`` optimizer steps.
    """
    accuracies = [step["train/accuracy"] for step in steps]
    window = min(WINDOW_STEPS, len(accuracies))
    ends = range(window, len(accuracies) + 1)
    means = {end: sum(accuracies[end - window : end]) / window for end in ends}
    differences = [step["rollout_corr/logp_diff_abs_mean"] for step in steps]
    return {
        "first": means[window],
        "last": means[len(accuracies)],
        "passes": means[len(accuracies)] > PASS_ACCURACY,
        "steps_to_pass": next((end for end in ends if means[end] > PASS_ACCURACY), None),
        "mismatch": sum(differences) / len(differences),
        "skipped": sum(step.get("actor/skipped_steps", 0.0) for step in steps),
    }


def megatron_rl(kind: str, recipe: str, *overrides: str, may_fail: bool = False) -> int:
    """Runs a recipe; see :func:`command`."""
    path = str(RECIPES / f"{recipe}.yaml")
    return command("megatron_rl.launch.cli", kind, "--config", path, *overrides, may_fail=may_fail)


def command(module: str, *arguments: str, may_fail: bool = False) -> int:
    """Runs a module, whose output goes to standard error, and returns its exit code."""
    finished = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=sys.stderr,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    if finished.returncode and not may_fail:
        sys.exit(f"{module} {arguments[0]} ended with exit code {finished.returncode}; see above")
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main())
