"""Metrics of a step that follow from its rollout batch and its stage times."""

import resource
import sys

import torch

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
