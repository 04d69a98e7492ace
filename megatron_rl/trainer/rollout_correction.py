"""The configured rule of :mod:`megatron_rl.algorithms.correction`, applied to a batch.

The weights multiply the surrogate alone. The KL and entropy terms regularise the policy on the
sampled tokens, and a token that is rejected as a sample of the policy gradient stays one of theirs.
"""

import torch

from megatron_rl.algorithms import correction
from megatron_rl.algorithms.correction import Correction
from megatron_rl.config import RolloutCorrectionConfig


def correct(
    config: RolloutCorrectionConfig,
    train_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
) -> Correction:
    """Importance weights of a batch by the configured rule.

    A token whose log-prob under the trainer is not finite is left out here: its loss is not finite
    either, and ends the step with an error that says so.

    Args:
        config: A rule other than ``none``.
        train_logprobs: ``[B, S]`` float32 under the policy that the update starts from.
        rollout_logprobs: ``[B, S]`` float32 as sampled.
        mask: ``[B, S]`` bool; for a sequence rule a row holds its whole sequence.

    Raises:
        ValueError: A rollout log-prob under the mask is not finite.
    """
    assert config.rule != "none"
    rule = getattr(correction, config.rule)
    mask = mask & torch.isfinite(train_logprobs)
    corrected: Correction = rule(train_logprobs, rollout_logprobs, mask, *config.bounds)
    return corrected
