"""The loss of a mini-batch, differentiated by the policy a micro-batch at a time.

    loss = sum_t w_t * (c_t * surrogate_t - entropy_coefficient * H_t + kl_coefficient * KL_t)

with weights ``w_t`` over the whole mini-batch (:mod:`megatron_rl.algorithms.aggregation`), so that
the cut into micro-batches and ranks changes nothing, and ``c_t`` the train/rollout correction, 1
when it is off.

A token of weight zero is replaced before any arithmetic, not multiplied away after: 0 * NaN is NaN,
in the loss and in the gradient.
"""

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import kl as kl_estimators
from megatron_rl.algorithms.aggregation import batch_totals, token_weights
from megatron_rl.algorithms.correction import Correction
from megatron_rl.algorithms.losses import PolicyLossInputs, PolicyLossOutput, clipped_surrogate
from megatron_rl.config import AlgorithmConfig
from megatron_rl.trainer.rollout_correction import correct

ESTIMATORS = {"k1": kl_estimators.k1, "k2": kl_estimators.k2, "k3": kl_estimators.k3}


@dataclass(frozen=True, kw_only=True)
class MiniBatchObjective:
    """The loss of one mini-batch; B and S are those of the rollout batch."""

    config: AlgorithmConfig
    advantages: torch.Tensor
    """``[B]`` float32."""
    weights: torch.Tensor
    """``[B, S]`` float32; zero outside the mini-batch."""
    old_logprobs: torch.Tensor | None
    """``[B, S]`` float32 of the policy that sampled; None means the policy itself (on-policy)."""
    ref_logprobs: torch.Tensor | None
    """``[B, S]`` float32 of the frozen reference; None without a KL term."""
    correction: torch.Tensor | None = None
    """``[B, S]`` float32 factors of the surrogate; None where there are none or they are made
    here."""
    rollout_logprobs: torch.Tensor | None = None
    """``[B, S]`` float32 as sampled: makes the factors of a per-token rule here, from the detached
    log-probs; None otherwise."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> torch.Tensor:
        """This micro-batch's share of the loss, as ``policy.execution.Objective`` defines it."""
        place = rows.cpu(), columns.cpu()
        weights = self.weights[place].to(logprobs.device)
        mask = weights != 0
        logprobs, entropy = logprobs.masked_fill(~mask, 0.0), entropy.masked_fill(~mask, 0.0)
        old = None if self.old_logprobs is None else self.old_logprobs[place].to(logprobs.device)
        advantages = self.advantages[place[0]].to(logprobs.device)
        loss = self.surrogate(logprobs[None], old, advantages[None], mask[None]).loss[0]
        if self.correction is not None:
            loss = loss * self.correction[place].to(logprobs.device)
        elif self.rollout_logprobs is not None:
            sampled = self.rollout_logprobs[place].to(logprobs.device)
            loss = (
                loss * self.token_correction(logprobs[None], sampled[None], mask[None]).weights[0]
            )
        if self.config.entropy_coefficient:
            loss = loss - self.config.entropy_coefficient * entropy
        if self.ref_logprobs is not None:
            ref = self.ref_logprobs[place].to(logprobs.device).masked_fill(~mask, 0.0)
            loss = loss + self.config.kl.coefficient * self.kl(logprobs, ref)
        return (weights * loss).sum()

    def surrogate(
        self,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor | None,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> PolicyLossOutput:
        """The clipped surrogate and its diagnostics, per token."""
        old = logprobs.detach() if old_logprobs is None else old_logprobs.reshape(logprobs.shape)
        return clipped_surrogate(
            PolicyLossInputs(logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask),
            clip_low=self.config.clip_ratio_low,
            clip_high=self.config.clip_ratio_high,
            dual_clip=self.config.dual_clip,
        )

    def token_correction(
        self, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor
    ) -> Correction:
        """Factors of a per-token rule, any cut of the batch; they carry no gradient."""
        assert self.config.rollout_correction.is_per_token
        return correct(self.config.rollout_correction, logprobs.detach(), rollout_logprobs, mask)

    def kl(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """The KL estimate to the reference, per token."""
        return ESTIMATORS[self.config.kl.estimator](logprobs, ref_logprobs)


def mini_batch_weights(
    loss_mask: torch.Tensor, rows: torch.Tensor, config: AlgorithmConfig, max_response_tokens: int
) -> torch.Tensor:
    """Weights of every token of the mini-batch; skipped samples count in the denominators.

    Args:
        loss_mask: ``[B, S]`` bool.
        rows: ``[B]`` bool, rows of the mini-batch.
        config: Aggregation mode.
        max_response_tokens: Constant length of ``seq-mean-token-sum-norm``.

    Returns:
        ``[B, S]`` float32; all zero when no token of the mini-batch is in the loss.
    """
    mask = loss_mask & rows[:, None]
    tokens, sequences = batch_totals(mask)
    if not tokens:
        return torch.zeros(mask.shape)
    return token_weights(
        mask,
        config.loss_aggregation,
        total_tokens=tokens,
        total_sequences=sequences,
        norm_length=max_response_tokens,
    )
