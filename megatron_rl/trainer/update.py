"""From a rollout batch to optimizer steps, and what to report of them.

Work is done only where it counts: a sample whose every loss term is zero is not computed (it stays
in the denominators), and a batch used for a single optimizer step needs no second forward for its
old log-probs, since the policy that is updated is the one that sampled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.algorithms.correction import Correction
from megatron_rl.config import RunConfig
from megatron_rl.metrics.mismatch import mismatch_metrics, signed_means
from megatron_rl.policy.policy import FrozenPolicy, Policy, UpdateResult
from megatron_rl.trainer.batch import RolloutBatch
from megatron_rl.trainer.objective import MiniBatchObjective, mini_batch_weights
from megatron_rl.trainer.rollout_correction import correct
from megatron_rl.trainer.step_metrics import combine_reports, optimizer_metrics
from megatron_rl.trainer.timing import Timings


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Log-probs of the sampling policy, and which tokens have them."""

    logprobs: torch.Tensor
    """``[B, S]`` float32."""
    rows: torch.Tensor
    """``[B]`` bool."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Log-probs of sampled tokens under the policy that sampled them, as training computes them."""

    logprobs: torch.Tensor
    """``[B, S]`` float32; zero where unknown."""
    mask: torch.Tensor
    """``[B, S]`` bool: tokens whose log-prob is known, and a number."""


def update_policy(
    policy: Policy,
    reference: FrozenPolicy | None,
    batch: RolloutBatch,
    config: RunConfig,
    timings: Timings,
    *,
    inspect: Callable[[Measured], None] = lambda measured: None,
    inspect_first: bool = False,
) -> dict[str, float]:
    """Takes every optimizer step of one rollout batch.

    Args:
        policy: Trained in place.
        reference: The frozen policy of the KL term, if there is one.
        batch: What was sampled.
        config: The run.
        timings: Filled by stage.
        inspect: Looks at the measured log-probs, and may raise.
        inspect_first: Let it look before the first optimizer step, for the price of a forward pass.

    Returns:
        Metrics ``actor/*``, ``rollout/*``, ``rollout_corr/*``, ``training/*`` and token counts.
    """
    algorithm, temperature = config.algorithm, config.rollout.temperature
    contributing = _contributing_rows(batch, config)
    mini_batches = _mini_batches(batch, config)
    on_policy = len(mini_batches) == 1
    old: torch.Tensor | None = None
    measured: list[Scored] = []
    num_tokens = 0
    rule = algorithm.rollout_correction
    corrected: Correction | None = None
    score_first = inspect_first or not on_policy or not (rule.rule == "none" or rule.is_per_token)
    if score_first:
        with timings.measure("old_log_prob"):
            scored = policy.score(batch.groups(contributing), batch.shape, temperature=temperature)
        num_tokens += scored.num_tokens
        measured.append(Scored(logprobs=scored.logprobs, rows=contributing))
        if not on_policy:
            old = scored.logprobs
        if rule.rule != "none":
            mask = batch.loss_mask & contributing[:, None]
            corrected = correct(rule, scored.logprobs, batch.rollout_logprobs, mask)
    corrects_tokens = rule.is_per_token and corrected is None
    probe = _skipped_probe(batch, contributing, measured_in_update=not score_first)
    if probe.any():
        with timings.measure("old_log_prob"):
            scored = policy.score(batch.groups(probe), batch.shape, temperature=temperature)
        measured.append(Scored(logprobs=scored.logprobs, rows=probe))
    may_overflow = policy.flow.loss_scale is not None
    if score_first:
        inspect(_known(batch, measured, may_overflow=may_overflow))
    ref = None
    if reference is not None:
        with timings.measure("ref"):
            ref = reference.score(
                batch.groups(contributing), batch.shape, temperature=temperature
            ).logprobs

    reports: list[dict[str, float]] = []
    with timings.measure("update_actor"):
        for rows in mini_batches:
            objective = MiniBatchObjective(
                config=algorithm,
                advantages=batch.advantages.values,
                weights=mini_batch_weights(
                    batch.loss_mask, rows, algorithm, config.rollout.max_response_length_tokens
                ),
                old_logprobs=old,
                ref_logprobs=ref,
                correction=None if corrected is None else corrected.weights,
                rollout_logprobs=batch.rollout_logprobs if corrects_tokens else None,
            )
            computed = rows & contributing
            if not computed.any():
                # The optimizer still steps (moments and schedule move), on zero gradients.
                computed = rows & (batch.group_ids == batch.group_ids[rows][0])
            result = policy.update(
                batch.groups(computed), batch.shape, objective, temperature=temperature
            )
            num_tokens += result.values.num_tokens
            if corrects_tokens:
                corrected = objective.token_correction(
                    result.values.logprobs,
                    batch.rollout_logprobs,
                    batch.loss_mask & computed[:, None],
                )
            factors = None if corrected is None else corrected.weights
            reports.append(_report(result, objective, computed, factors))
            if not score_first:
                measured.insert(0, Scored(logprobs=result.values.logprobs, rows=computed))
    metrics = combine_reports(reports)
    known = _known(batch, measured, may_overflow=may_overflow)
    if not score_first:
        inspect(known)
    if known.mask.any():
        arguments = known.logprobs, batch.rollout_logprobs, known.mask
        metrics |= mismatch_metrics(*arguments)
        metrics |= signed_means(*arguments, batch.advantages.values)
    if corrected is not None:
        metrics |= corrected.metrics
    metrics["rollout/skipped_samples_share"] = 1.0 - contributing.float().mean().item()
    metrics["perf/update_num_tokens"] = float(num_tokens)
    return metrics


def _contributing_rows(batch: RolloutBatch, config: RunConfig) -> torch.Tensor:
    """``[B]`` bool: rows with a loss term that is not zero."""
    in_loss = batch.loss_mask.any(dim=1)
    if config.algorithm.kl.coefficient or config.algorithm.entropy_coefficient:
        return in_loss
    return in_loss & (batch.advantages.values != 0)


def _skipped_probe(
    batch: RolloutBatch, contributing: torch.Tensor, *, measured_in_update: bool = True
) -> torch.Tensor:
    """``[B]`` bool: one group of skipped samples, so that mismatch is measured on them too.

    Where nothing contributes, the update itself computes such a group, and is measured instead.
    """
    skipped = ~contributing
    if not skipped.any() or (measured_in_update and not contributing.any()):
        return torch.zeros_like(skipped)
    return skipped & (batch.group_ids == batch.group_ids[skipped][0])


def _mini_batches(batch: RolloutBatch, config: RunConfig) -> list[torch.Tensor]:
    """Rows of each optimizer step, ``[B]`` bool, epoch after epoch, whole prompts at a time."""
    num_prompts = len(batch.prompts)
    size = config.algorithm.mini_batch_size_prompts or num_prompts
    starts = range(0, num_prompts, size)
    one_epoch = [(batch.group_ids >= s) & (batch.group_ids < s + size) for s in starts]
    return one_epoch * config.algorithm.num_epochs


def _report(
    result: UpdateResult,
    objective: MiniBatchObjective,
    computed: torch.Tensor,
    correction: torch.Tensor | None,
) -> dict[str, float]:
    """Metrics of one optimizer step, over the tokens that it computed."""
    if not math.isfinite(result.values.loss):
        return optimizer_metrics(result)  # the forward pass overflowed: nothing else is a number
    logprobs, weights = result.values.logprobs, objective.weights
    mask = (weights != 0) & computed[:, None]
    tokens = max(int(mask.sum()), 1)
    output = objective.surrogate(
        logprobs, objective.old_logprobs, objective.advantages[:, None], mask
    )

    def mean(values: torch.Tensor) -> float:
        return float(values.masked_fill(~mask, 0.0).sum().item() / tokens)

    pg_loss = output.loss if correction is None else output.loss * correction
    clipped = output.clipped_high | output.clipped_low
    positive, negative = objective.advantages > 0, objective.advantages < 0
    report = {
        "actor/loss": result.values.loss,
        "actor/pg_loss": float((weights * pg_loss).sum()),
        "actor/entropy": mean(result.values.entropy),
        "actor/ppo_kl": mean(output.approx_kl_k1),
        "actor/pg_clipfrac": mean(clipped),
        "actor/pg_clipfrac_low": mean(output.clipped_low),
        "actor/pg_clipfrac_pos": _share(clipped, mask & positive[:, None]),
        "actor/pg_clipfrac_neg": _share(clipped, mask & negative[:, None]),
    }
    if objective.ref_logprobs is not None:
        per_token = objective.kl(logprobs, objective.ref_logprobs)
        report["actor/kl_loss"] = float((weights * per_token.masked_fill(~mask, 0.0)).sum())
    return report | optimizer_metrics(result)


def _share(chosen: torch.Tensor, mask: torch.Tensor) -> float:
    """Share of the masked tokens that are chosen; 0 of none."""
    return float((chosen & mask).sum().item() / max(int(mask.sum()), 1))


def _known(batch: RolloutBatch, measured: list[Scored], *, may_overflow: bool) -> Measured:
    """Every token whose log-prob under the sampling policy was computed.

    Where the forward pass may overflow, tokens whose log-prob is no number are left out.
    """
    logprobs = torch.zeros(batch.shape)
    mask = torch.zeros(batch.shape, dtype=torch.bool)
    for scored in measured:
        rows = scored.rows[:, None] & batch.response_mask
        logprobs = torch.where(rows, scored.logprobs, logprobs)
        mask |= rows
    if may_overflow:
        mask &= logprobs.isfinite() & batch.rollout_logprobs.isfinite()
    return Measured(logprobs=logprobs, mask=mask)
