"""A run directory made up from a seed: what a short, successful run leaves behind."""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics import (
    MetricsWriter,
    Rollout,
    evaluation_path,
    rollouts_path,
    write_rollouts,
)
from megatron_rl.report import build_report

FabricateRun = Callable[..., Path]
HOSTILE_PROMPT = "Q: <script>alert('x')</script> & <b>1</b> + 1 =\nA:"
SHOTS = "Q: 12 + 7 =\nA: 19\n\nQ: 40 - 8 =\nA: 32\n\n"


def _skill(step: int, total: int) -> float:
    """Share of right answers: rises, then flattens."""
    return 0.12 + 0.55 * (1 - (1 - step / max(total, 1)) ** 2)


def _rollout(rng: random.Random, step: int, skill: float, row: int, **extra: object) -> Rollout:
    left, right = random.Random(row).choices(range(10, 100), k=2)
    truth = left + right
    is_right = rng.random() < skill
    answer = truth if is_right else truth + rng.choice([-10, -1, 1, 10, 100])
    return Rollout(
        step=step,
        data_source="chain_sum",
        prompt=HOSTILE_PROMPT if row == 3 else f"{SHOTS}Q: {left} + {right} =\nA:",
        response=f" {answer}\n" if rng.random() < 0.9 else f" {answer}\n\nQ: 17 + 3 =\nA: 20 <b>",
        ground_truth=str(truth),
        score=float(is_right),
        accuracy=float(is_right),
        truncated=rng.random() < 0.06,
        response_length_tokens=rng.randint(3, 24),
        **extra,
    )


def _step_metrics(rng: random.Random, step: int, total: int, mismatch: float) -> dict[str, float]:
    reward = min(1.0, max(0.0, _skill(step, total) + rng.gauss(0, 0.03)))
    gen, update = 6.1 + rng.gauss(0, 0.4), 4.2 + rng.gauss(0, 0.2)
    timing = {
        "gen": gen,
        "reward": 0.12,
        "old_log_prob": 1.4 + rng.gauss(0, 0.1),
        "update_actor": update,
        "sync": 0.55,
    }
    if step % 10 == 0:
        timing |= {"eval": 2.5, "save": 1.1}
    step_s = sum(timing.values()) + 0.1
    length = 14 - 7 * step / total + rng.gauss(0, 0.4)
    return {
        "critic/rewards/mean": reward,
        "critic/rewards/std": (reward * (1 - reward)) ** 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "train/accuracy": reward,
        "response_length/mean": length,
        "response_length/max": 24.0,
        "response_length/min": 3.0,
        "response_length/clip_ratio": max(0.0, 0.12 - 0.11 * step / total),
        "prompt_length/mean": 41.0,
        "actor/pg_loss": rng.gauss(0, 0.004),
        "actor/entropy": 1.3 * 0.95**step + 0.1,
        "actor/grad_norm": 1.1 * 0.97**step + abs(rng.gauss(0, 0.05)),
        "actor/lr": 1e-5,
        "rollout_corr/logp_diff_abs_mean": mismatch * rng.uniform(0.8, 1.2),
        "rollout_corr/logp_diff_abs_max": mismatch * rng.uniform(20, 40),
        "rollout_corr/exact_share": 1.0 if mismatch == 0 else rng.uniform(0.35, 0.45),
        "rollout_corr/kl": mismatch * 1e-3,
        "perf/total_num_tokens": 7200.0,
        "perf/time_per_step": step_s,
        "perf/rollout_tokens_per_s": 7200 / gen,
        **{f"timing_s/{phase}": seconds for phase, seconds in timing.items()},
    }


def _evaluate(
    run_dir: Path, writer: MetricsWriter, rng: random.Random, step: int, steps: int
) -> None:
    rows = [_rollout(rng, step, _skill(step, steps), row, mode="greedy") for row in range(64)]
    write_rollouts(evaluation_path(run_dir, step), rows)
    accuracy = sum(row.accuracy or 0.0 for row in rows) / len(rows)
    writer.log(
        step,
        {
            "val-core/chain_sum/acc/mean": accuracy,
            "val-core/chain_sum/reward/mean": accuracy,
            "val-core/chain_sum/acc/mean@4": 0.9 * accuracy,
            "val-core/chain_sum/reward/mean@4": 0.9 * accuracy,
            "timing_s/eval": 2.5,
        },
    )


def fabricate(
    run_dir: Path,
    *,
    steps: int = 20,
    planned_steps: int | None = None,
    evaluations: bool = True,
    mismatch: float = 0.0,
    seed: int = 0,
) -> Path:
    """Fills ``run_dir`` as a run of ``steps`` steps would; no network, no model, no clock."""
    rng = random.Random(seed)
    planned = planned_steps or max(steps, 1)
    run_dir.mkdir(parents=True)
    config = {
        "name": run_dir.name,
        "seed": seed,
        "model": {"path": "smollm2-135m-instruct"},
        "precision": {"flow": "bf16"},
        "data": {
            "train": [{"name": "chain_sum", "kind": "reasoning_gym", "size": 4096}],
            "val": [{"name": "chain_sum", "kind": "reasoning_gym", "size": 64}],
            "train_batch_size": 16,
        },
        "rollout": {"n": 8, "temperature": 1.0},
        "algorithm": {"advantage_estimator": "grpo"},
        "trainer": {"total_steps": planned},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    environment = {
        "megatron_rl": "0.1.0",
        "python": "3.11.9",
        "packages": {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "vllm": "0.32.0+cpu"},
        "hardware": {"cpu": "EPYC", "num_cpus": 2, "memory_gib": 15.6, "gpu": None},
        "flow": "bf16",
        "flow_summary": "BF16 training with FP32 master weights, BF16 rollout",
        "command": ["megatron-rl", "train", "--config", "quickstart.yaml"],
        "started_at": "2026-01-31T12:00:00+00:00",
    }
    (run_dir / "env.json").write_text(json.dumps(environment))
    now = [0.0]
    with MetricsWriter(run_dir, LoggingConfig(), resume_step=None, clock=lambda: now[0]) as writer:
        if evaluations:
            _evaluate(run_dir, writer, rng, 0, planned)
        for step in range(1, steps + 1):
            metrics = _step_metrics(rng, step, planned, mismatch)
            now[0] += metrics["perf/time_per_step"]
            writer.log(step, metrics)
            group = [_rollout(rng, step, _skill(step, planned), step) for _ in range(8)]
            mean = sum(row.score for row in group) / len(group)
            write_rollouts(
                rollouts_path(run_dir, step),
                [replace(row, advantage=row.score - mean) for row in group],
            )
            if evaluations and (step % 10 == 0 or step == planned):
                _evaluate(run_dir, writer, rng, step, planned)
    return run_dir


@pytest.fixture
def fabricate_run(tmp_path: Path) -> FabricateRun:
    """A function that makes up a run directory below ``tmp_path`` and returns its path."""

    def make(name: str = "quickstart", **options: object) -> Path:
        return fabricate(tmp_path / name, **options)

    return make


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> FabricateRun:
    """As ``fabricate_run``, for tests that only read: equal options give the same directory."""

    @functools.cache
    def make(**options: object) -> Path:
        return fabricate(tmp_path_factory.mktemp("shared") / "quickstart", **options)

    return make


@pytest.fixture(scope="session")
def reported_run(shared_run: FabricateRun) -> FabricateRun:
    """As ``shared_run``, with the report built."""

    @functools.cache
    def make(**options: object) -> Path:
        return build_report(shared_run(**options)).parent

    return make


@pytest.fixture(scope="session")
def finished_run(reported_run: FabricateRun) -> Path:
    """A complete run of 20 steps with equal log-probs, whose report is built."""
    return reported_run()
