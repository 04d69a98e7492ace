"""One GRPO step, stage by stage, against vLLM, Megatron and TRL on their own.

    python -m benchmarks.step                                   # quickstart model, without TRL
    python -m benchmarks.step --model tiny --rounds 20
    python -m benchmarks.step --trl-python .venv-trl/bin/python --markdown docs/benchmarks/step.md

The contenders take turns in one run (product, vLLM, Megatron, TRL, product, ...), each in a process
of its own that is stopped while another works; see docs/benchmarks.md for what each of them is.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._common import ROOT, Contender, Spread, machine, markdown_table, write_markdown

RECIPE = ROOT / "scripts/recipes/quickstart-cpu.yaml"
Round = dict[str, dict[str, Any]]
"""Answers of one round, by contender."""


@dataclass(frozen=True)
class Comparison:
    """A ratio of two measurements of the same round, and the bound it is held to."""

    title: str
    ratio: Callable[[Round], float]
    wanted: str
    contenders: tuple[str, ...]


def seconds(contender: str, stage: str) -> Callable[[Round], float]:
    return lambda answers: float(answers[contender]["stages"][stage])


def quotient(
    upper: Callable[[Round], float], lower: Callable[[Round], float]
) -> Callable[[Round], float]:
    return lambda answers: upper(answers) / lower(answers)


STAGES = (
    ("rollout", "product", "gen"),
    ("reward", "product", "reward"),
    ("update", "product", "update_actor"),
    ("sync", "product", "sync"),
    ("whole step", "product", "step"),
    ("rollout", "vLLM", "gen"),
    ("update", "Megatron", "update_actor"),
    ("whole step", "TRL", "step"),
)
COMPARISONS = (
    Comparison(
        "rollout throughput / vLLM's",
        quotient(seconds("vLLM", "gen"), seconds("product", "gen")),
        ">= 0.95",
        ("vLLM",),
    ),
    Comparison(
        "update time / Megatron's",
        quotient(seconds("product", "update_actor"), seconds("Megatron", "update_actor")),
        "<= 1.10",
        ("Megatron",),
    ),
    Comparison(
        "sync time / whole step",
        quotient(seconds("product", "sync"), seconds("product", "step")),
        "<= 0.03",
        (),
    ),
    Comparison(
        "TRL's whole step / whole step",
        quotient(seconds("TRL", "step"), seconds("product", "step")),
        ">= 4.00",
        ("TRL",),
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="megatron_rl_benchmark_logs_") as logs:
        contenders, about = _start(arguments, Path(logs))
        try:
            rounds = _measure(contenders, arguments.rounds, arguments.warmup)
        finally:
            for contender in contenders.values():
                contender.close()
    write_markdown(report(arguments, rounds, about), arguments.markdown)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="or a directory, or `tiny`"
    )
    parser.add_argument("--rounds", type=int, default=8, help="measured turns of each contender")
    parser.add_argument("--warmup", type=int, default=2, help="turns before, not measured")
    parser.add_argument("--response-tokens", type=int, default=5, help="tokens of every response")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument(
        "--trl-micro-batch", type=int, default=32, help="sequences in one forward and backward"
    )
    parser.add_argument(
        "--trl-autocast", action="store_true", help="FP32 weights and autocast, not BF16 weights"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME", help="vLLM, Megatron")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.warmup < 1:
        parser.error("--rounds and --warmup must be 1 or more")
    return arguments


def _start(
    arguments: argparse.Namespace, logs: Path
) -> tuple[dict[str, Contender], dict[str, Any]]:
    """Starts the contenders one after the other, so that none loads while another warms up."""
    steps = arguments.rounds + arguments.warmup
    overrides = [f"rollout.max_response_length_tokens={arguments.response_tokens}"]
    if arguments.model == "tiny":
        # One token a byte.
        overrides.append("data.max_prompt_length_tokens=256")
    job = {
        "recipe": str(arguments.recipe),
        "model": arguments.model,
        "steps": steps,
        "overrides": [*overrides, *arguments.overrides],
    }
    contenders: dict[str, Contender] = {}

    def add(name: str, module: str, job: dict[str, Any], **options: str) -> None:
        if name not in arguments.without:
            start = time.monotonic()
            module = f"benchmarks.contenders.{module}"
            contenders[name] = Contender(name, module, job, logs / f"{name}.log", **options)
            _progress(f"{name} is ready after {time.monotonic() - start:.0f} s")

    try:
        add("product", "product", job)
        about = contenders["product"].ready
        same_model = job | {"model": about["model_path"]}
        add("vLLM", "bare_vllm", about | {"settings": {}})
        add("Megatron", "bare_megatron", same_model)
        if arguments.trl_python:
            job = about | {
                "steps": steps,
                "micro_batch": arguments.trl_micro_batch,
                "autocast": arguments.trl_autocast,
            }
            add("TRL", "trl", job, python=arguments.trl_python)
            about = about | {"trl": contenders["TRL"].ready}
    except BaseException:
        for contender in contenders.values():
            contender.close()
        raise
    return contenders, about


def _measure(contenders: dict[str, Contender], num_rounds: int, warmup: int) -> list[Round]:
    """The measured rounds.

    Within a round all work on the product's step: its requests, then the tokens it sampled.
    """
    rounds: list[Round] = []
    for index in range(warmup + num_rounds):
        answers: Round = {}
        record: dict[str, Any] = {}
        for name, contender in contenders.items():
            answers[name] = contender.turn(record)
            if name == "product":
                record = {k: answers[name][k] for k in ("prompts", "seeds", "responses")}
        _check_same_work(answers)
        stages = ", ".join(
            f"{name} {title} {answers[name]['stages'][key]:.2f}"
            for title, name, key in STAGES
            if name in answers
        )
        _progress(f"round {index + 1} of {warmup + num_rounds} ({stages} s)")
        if index >= warmup:
            rounds.append(answers)
    return rounds


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_same_work(answers: Round) -> None:
    product = answers["product"]
    for name, key in (("vLLM", "response_tokens"), ("Megatron", "update_tokens")):
        if name in answers and answers[name][key] != product[key]:
            raise RuntimeError(
                f"{name} worked on {answers[name][key]} {key}, the product on {product[key]}; the "
                "figures cannot be compared"
            )
    if product["skipped"]:
        raise RuntimeError(f"the product skipped {product['skipped']:.0%} of the samples")


def report(arguments: argparse.Namespace, rounds: list[Round], about: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    names = list(rounds[0])
    product = rounds[0]["product"]
    rows = []
    for stage, contender, key in STAGES:
        if contender in names:
            spread = Spread.of([seconds(contender, key)(answers) for answers in rounds])
            per_step = (
                "" if stage != "rollout" else f"{product['response_tokens'] / spread.median:,.0f}"
            )
            if stage == "update":
                per_step = f"{product['update_tokens'] / spread.median:,.0f}"
            rows.append([f"{contender}: {stage}", spread.text(), per_step])
    ratios = []
    for comparison in COMPARISONS:
        if all(name in names for name in comparison.contenders):
            spread = Spread.of([comparison.ratio(answers) for answers in rounds])
            kept = holds(spread.median, comparison.wanted)
            ratios.append(
                [comparison.title, spread.text(), comparison.wanted, "yes" if kept else "**no**"]
            )
    prompt_tokens = sum(len(p) for p in product["prompts"]) / about["num_prompts"]
    load = (
        f"{arguments.model}, {about['num_prompts']} prompts of about {prompt_tokens:.0f} tokens x "
        f"{about['num_samples']} samples x {about['max_tokens']} new tokens, {about['dtype']}. "
        f"{len(rounds)} rounds after {arguments.warmup} to warm up, {', '.join(names)} in turn. "
        f"{machine()}."
    )
    if "trl" in about:
        versions = ", ".join(f"{name} {version}" for name, version in about["trl"].items())
        weights = "FP32 weights under autocast" if arguments.trl_autocast else "BF16 weights"
        load += (
            f" TRL's environment: {versions}; {weights}, {arguments.trl_micro_batch} sequences a "
            "forward and backward."
        )
    stage_header = ["stage", "s, median (range)", "tokens/s"]
    ratio_header = ["ratio, of the same round", "median (range)", "wanted", "holds"]
    return "\n\n".join(
        [load, markdown_table(stage_header, rows), markdown_table(ratio_header, ratios)]
    )


def holds(value: float, bound: str) -> bool:
    """Whether a value keeps a bound such as ``>= 0.95``."""
    relation, limit = bound.split()
    return value >= float(limit) if relation == ">=" else value <= float(limit)


if __name__ == "__main__":
    main()
