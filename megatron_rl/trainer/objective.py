"""The loss of a mini-batch, differentiated by the policy a micro-batch at a time.

    loss = sum_t w_t * (surrogate_t - entropy_coefficient * H_t + kl_coefficient * KL_t)

with weights ``w_t`` over the whole mini-batch (:mod:`megatron_rl.algorithms.aggregation`), so that
the cut into micro-batches and ranks changes nothing.
"""

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import kl as kl_estimators
from megatron_rl.algorithms.aggregation import batch_totals, token_weights
from megatron_rl.algorithms.losses import PolicyLossInputs, PolicyLossOutput, clipped_surrogate
from megatron_rl.config import AlgorithmConfig

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
        old = None if self.old_logprobs is None else self.old_logprobs[place].to(logprobs.device)
        advantages = self.advantages[place[0]].to(logprobs.device)
        loss = self.surrogate(logprobs[None], old, advantages[None], (weights != 0)[None]).loss[0]
        if self.config.entropy_coefficient:
            loss = loss - self.config.entropy_coefficient * entropy
        if self.ref_logprobs is not None:
            ref = self.ref_logprobs[place].to(logprobs.device)
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
