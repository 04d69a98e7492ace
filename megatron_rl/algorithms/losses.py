"""Policy losses per token, and the diagnostics that come with them.

Each loss is one function over `PolicyLossInputs`. What it returns is *not* aggregated: how tokens
are weighted is the business of `aggregation`, and train/rollout correction (`correction`)
multiplies the per-token loss. So a step reads

    loss = (token_weights * correction.weights * clipped_surrogate(...).loss).sum()

With r = exp(log policy - log old policy) and advantage A of a token. Whatever the loss, when the
old log-probs are the detached current ones (one update per batch), r is exactly 1 and the gradient
is REINFORCE's, -A * d log policy.

The entropy bonus and the KL term are not here; they are added per token by the caller.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import kl
from megatron_rl.algorithms._checks import full_precision, response_mask

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus or minus this before exp, which then spans 2e-9 to 5e8."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PolicyLossInputs:
    """What every policy loss reads. Values outside the mask are never read, NaN included."""

    logprobs: Tensor
    """[B, S] float32, the sampled tokens under the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    """[B, S] float32, the same tokens under the policy that the ratio is taken against."""
    advantages: Tensor
    """[B, S] or [B, 1] float32."""
    mask: Tensor
    """[B, S] bool or 0/1, the response tokens."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PolicyLossOutput:
    """A loss and detached diagnostics, all [B, S]; outside the mask 0, False, or ratio 1."""

    loss: Tensor
    """float32, the token's loss; the only field with a gradient."""
    ratio: Tensor
    """float32, the ratio the loss was built on: of the token, or of its sequence in `gspo`."""
    clipped_low: Tensor
    """bool, the lower bound acted: in a clipped surrogate, only where the advantage is negative."""
    clipped_high: Tensor
    """bool, the upper bound acted: in a clipped surrogate, only where the advantage is positive."""
    clipped_dual: Tensor
    """bool, the dual clip acted (negative advantage, ratio above its bound)."""
    approx_kl_k1: Tensor
    """float32, log old - log policy; its mean over tokens estimates KL(old || policy)."""
    approx_kl_k3: Tensor
    """float32, the same quantity by `kl.k3`: never negative, less noisy."""


def clipped_surrogate(
    inputs: PolicyLossInputs,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLossOutput:
    """PPO's clipped surrogate with an asymmetric range and an optional dual clip.

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        l = min(l, -dual_clip * A)                                where A < 0

    Sources: PPO, arXiv 1707.06347; clip-higher from DAPO, arXiv 2503.14476; dual clip,
    arXiv 1912.09729.

    Args:
        inputs: see `PolicyLossInputs`.
        clip_low: in [0, 1]; 1 is no lower bound.
        clip_high: not negative; infinity is no upper bound.
        dual_clip: greater than 1, or None for none. Bounds the loss of a token with a negative
            advantage whose probability grew, which the surrogate leaves unbounded.

    Raises:
        ValueError: a bound out of range; shapes or dtypes that do not fit.
    """
    tokens = _Tokens.of(inputs)
    return tokens.surrogate(
        _exp(tokens.log_ratio), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def gspo(inputs: PolicyLossInputs, *, clip_low: float, clip_high: float) -> PolicyLossOutput:
    """Clipped surrogate on the ratio of the whole sequence, length-normalised.

        s = exp((1 / |y|) sum_t log r_t)
        l_t = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A),   s_t = sg[s] r_t / sg[r_t]

    Source: GSPO, arXiv 2507.18071, in its token form (GSPO-token), which has the value
    and the gradient of the sequence form under the aggregation `seq-mean-token-mean`, the one to
    use. A row must hold its whole sequence. Bounds are a thousand times tighter than PPO's: the
    paper uses 3e-4 and 4e-4. Arguments and errors as for `clipped_surrogate`.
    """
    tokens = _Tokens.of(inputs)
    lengths = tokens.mask.sum(dim=1, keepdim=True).clamp(min=1)
    sequence = _exp(tokens.log_ratio.detach().sum(dim=1, keepdim=True) / lengths)
    ratio = sequence * torch.exp(tokens.logprobs - tokens.logprobs.detach())
    ratio = torch.where(tokens.mask, ratio, 1.0)
    return tokens.surrogate(ratio, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def cispo(inputs: PolicyLossInputs, *, clip_low: float, clip_high: float) -> PolicyLossOutput:
    """REINFORCE weighted by a clipped, detached ratio: a token beyond the range keeps its gradient.

        l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log policy

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, which leaves the lower side open (clip_low = 1).
    The value of this loss is not comparable with a surrogate's; only its gradient has a meaning.
    Clipping does not look at the advantage's sign. Arguments and errors as for `clipped_surrogate`.
    """
    tokens = _Tokens.of(inputs)
    low, high = _range(clip_low, clip_high)
    ratio = _exp(tokens.log_ratio).detach()
    return tokens.output(
        loss=-ratio.clamp(low, high) * tokens.advantages * tokens.logprobs,
        ratio=ratio,
        clipped_low=ratio < low,
        clipped_high=ratio > high,
    )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Tokens:
    """The inputs with padding replaced by zeros *before* any arithmetic.

    Masking the result instead would let NaN in padding into the gradient: 0 * NaN is NaN.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    @staticmethod
    def of(inputs: PolicyLossInputs) -> "_Tokens":
        mask = response_mask(
            inputs.mask, logprobs=inputs.logprobs, old_logprobs=inputs.old_logprobs
        )
        full_precision(logprobs=inputs.logprobs, old_logprobs=inputs.old_logprobs)
        advantages = inputs.advantages
        if advantages.shape not in (mask.shape, (mask.shape[0], 1)):
            raise ValueError(
                f"advantages have shape {list(advantages.shape)}, expected {list(mask.shape)} or "
                f"{[mask.shape[0], 1]}; add a last axis to one advantage per response."
            )
        return _Tokens(
            logprobs=inputs.logprobs.masked_fill(~mask, 0.0),
            old_logprobs=inputs.old_logprobs.detach().masked_fill(~mask, 0.0),
            advantages=advantages.detach().expand_as(mask).masked_fill(~mask, 0.0),
            mask=mask,
        )

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.old_logprobs

    def surrogate(
        self, ratio: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
    ) -> PolicyLossOutput:
        low, high = _range(clip_low, clip_high)
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(
                f"dual_clip is {dual_clip}, expected a number above 1 (3 is usual) or none."
            )
        advantages = self.advantages
        positive, negative = advantages > 0, advantages < 0
        # The min over A's sign, written out: a bound acts on one side only, and where it acts the
        # loss is constant, so that ties at the bound need no thought.
        clipped_low = negative & (ratio < low)
        clipped_high = positive & (ratio > high)
        clipped_dual = torch.zeros_like(self.mask)
        loss = -advantages * ratio
        loss = torch.where(clipped_low, -advantages * low, loss)
        loss = torch.where(clipped_high, -advantages * high, loss)
        if dual_clip is not None:
            clipped_dual = negative & (ratio > dual_clip)
            loss = torch.where(clipped_dual, -advantages * dual_clip, loss)
        return self.output(
            loss=loss,
            ratio=ratio.detach(),
            clipped_low=clipped_low,
            clipped_high=clipped_high,
            clipped_dual=clipped_dual,
        )

    def output(
        self,
        *,
        loss: Tensor,
        ratio: Tensor,
        clipped_low: Tensor,
        clipped_high: Tensor,
        clipped_dual: Tensor | None = None,
    ) -> PolicyLossOutput:
        logprobs = self.logprobs.detach()
        if clipped_dual is None:
            clipped_dual = torch.zeros_like(self.mask)
        return PolicyLossOutput(
            loss=loss,
            ratio=ratio,
            clipped_low=clipped_low & self.mask,
            clipped_high=clipped_high & self.mask,
            clipped_dual=clipped_dual,
            approx_kl_k1=kl.k1(self.old_logprobs, logprobs),
            approx_kl_k3=kl.k3(self.old_logprobs, logprobs),
        )


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _range(clip_low: float, clip_high: float) -> tuple[float, float]:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, expected 0 to 1; 1 is no lower bound.")
    if math.isnan(clip_high) or clip_high < 0:
        raise ValueError(
            f"clip_high is {clip_high}, expected 0 or more; infinity is no upper bound."
        )
    return 1 - clip_low, 1 + clip_high
