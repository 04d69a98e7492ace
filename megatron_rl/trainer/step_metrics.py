"""Metrics of a step that follow from its rollout batch and its stage times."""

import resource
import sys
from collections.abc import Sequence

import torch

from megatron_rl.policy.policy import UpdateResult
from megatron_rl.trainer.batch import RolloutBatch
from megatron_rl.trainer.timing import Timings


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards, lengths and group statistics of a rollout batch."""
    lengths = batch.lengths.float()
    prompt_lengths = torch.tensor([len(p.token_ids) for p in batch.prompts]).float()
    accuracies = [r.accuracy for r in batch.rewards if r.accuracy is not None]
    metrics = {
        "response_length/clip_ratio": _mean([c.truncated for c in batch.completions]),
        "rollout/zero_spread_groups": float(batch.advantages.num_zero_spread_groups),
        "rollout/singleton_groups": float(batch.advantages.num_singleton_groups),
        "rollout/reward_failures": float(sum(r.failed is not None for r in batch.rewards)),
        "critic/rewards/std": batch.scores.std(correction=0).item(),
    }
    if accuracies:
        metrics["train/accuracy"] = _mean(accuracies)
    for name, values in (
        ("critic/rewards", batch.scores),
        ("critic/advantages", batch.advantages.values),
        ("response_length", lengths),
        ("prompt_length", prompt_lengths),
    ):
        metrics[f"{name}/mean"] = values.mean().item()
        metrics[f"{name}/max"] = values.max().item()
        metrics[f"{name}/min"] = values.min().item()
    return metrics


def optimizer_metrics(result: UpdateResult) -> dict[str, float]:
    """Gradient norm, learning rate and loss scale of one optimizer step.

    A skipped step has no gradient norm; a flow without a loss scale has none of its metrics.
    """
    metrics = {} if result.skipped else {"actor/grad_norm": result.grad_norm}
    metrics["actor/lr"] = result.lr
    if result.loss_scale is not None:
        metrics["actor/loss_scale"] = result.loss_scale
        metrics["actor/skipped_steps"] = float(result.skipped)
    return metrics


def combine_reports(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a rollout batch from those of its optimizer steps.

    Means, over the steps that have the metric; but the number of skipped steps, and the last loss
    scale.
    """
    combined: dict[str, float] = {}
    for key in dict.fromkeys(key for report in reports for key in report):
        values = [report[key] for report in reports if key in report]
        combined[key] = sum(values) / len(values)
        if key == "actor/skipped_steps":
            combined[key] = sum(values)
        elif key == "actor/loss_scale":
            combined[key] = values[-1]
    return combined


def throughput_metrics(
    batch: RolloutBatch, metrics: dict[str, float], timings: Timings
) -> dict[str, float]:
    """Tokens per second and memory.

    ``perf/rollout_tokens_per_s`` counts sampled tokens; ``perf/update_tokens_per_s`` the tokens
    that a padded, unshared batch would have held, so that skipping work shows as speed.
    """
    seconds = timings.seconds
    sampled = float(batch.lengths.sum())
    prompt_tokens = sum(len(batch.prompts[c.prompt_index].token_ids) for c in batch.completions)
    total = sampled + prompt_tokens
    update_s = sum(seconds.get(s, 0.0) for s in ("old_log_prob", "ref", "update_actor"))
    return timings.metrics() | {
        "perf/rollout_tokens_per_s": sampled / seconds["gen"],
        "perf/update_tokens_per_s": total / update_s,
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds["step"],
        "perf/rss_gib": peak_rss_gib(),
    }


def peak_rss_gib() -> float:
    """Most memory that this process has held, in GiB."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes *= 1 if sys.platform == "darwin" else 1024
    return peak_bytes / 2**30


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values)
