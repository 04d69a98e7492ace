"""Correction of the mismatch between the policy that sampled and the policy that is differentiated.

Rollout and trainer compute the log-prob of the same token with different arithmetic (or different
weights), so a batch is off-policy even when it is fresh. With d_t = log train - log rollout of a
sampled token, the importance ratio is rho_t = exp(d_t), and of a sequence exp(sum d_t). Each rule
below turns ratios into weights for the per-token loss, in one order:

    clamp the log ratio to +-20  ->  reject (edit the mask)  ->  truncate  ->  detach

A weight is 0 wherever the corrected mask is False, so `weights * loss` under the *response* mask
and its totals is the importance-sampled estimate; renormalising by the corrected mask instead would
turn each rejection into a larger step for the rest (see `aggregation`). On agreement every weight
is exactly 1 and nothing is rejected.

Rules chain: pass one rule's `mask` to the next and multiply the weights. A sequence rule then sees
the tokens that are left.

Use a correction only where the loss's ratio is taken against the *trainer's* log-probs (decoupled:
old = recomputed). Where the rollout's log-probs serve as the old ones (bypass), the loss's own
ratio already contains rho; multiplying again squares it.

Sources: token truncation, F. Yao et al. 2025, fengyao.notion.site/off-policy-rl; sequence
truncation, sequence masking and geometric rejection, J. Liu, Y. Li et al. 2025,
richardli.xyz/rl-collapse, and arXiv 2510.26788 for masking; IcePop, Ring-1T, arXiv 2510.18855.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms._checks import full_precision, response_mask

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus or minus this; sequence rules sum first, then clamp."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Correction:
    """Importance weights of a batch, detached."""

    weights: Tensor
    """[B, S] float32, factor of each token's loss; 0 outside `mask`."""
    mask: Tensor
    """[B, S] bool, the response tokens that were kept."""
    metrics: dict[str, float]
    """Of this call's response tokens, empty when there is none. Under `rollout_corr/`:

    - `rollout_is_mean`, `_max`, `_min`: weights of the kept tokens; 0 if none was kept
    - `rollout_is_ratio_fraction_high`, `_low`: share of tokens whose ratio is beyond the bound
    - `rollout_rs_masked_fraction`: share of tokens rejected
    - `rollout_rs_seq_masked_fraction`: share of sequences that lost a token
    """


def token_tis(train_lp: Tensor, rollout_lp: Tensor, mask: Tensor, cap: float) -> Correction:
    """Truncated importance sampling per token.

        w_t = min(rho_t, cap)

    Bounded variance, biased: a token's ratio ignores how likely its prefix was.

    Args:
        train_lp: [B, S] float32, log-probs of the sampled tokens under the trainer.
        rollout_lp: [B, S] float32, the same tokens as the rollout engine reported them.
        mask: [B, S] bool or 0/1, the response tokens. Values elsewhere are never read.
        cap: largest weight, at least 1; 2 is usual.

    Raises:
        ValueError: a log-prob that is not finite under the mask, `cap` < 1, shapes or dtypes that
            do not fit.
    """
    _require_cap(cap)
    mask, log_ratio = _log_ratio(train_lp, rollout_lp, mask)
    ratio = _exp(log_ratio)
    return _correction(mask, kept=mask, weights=ratio.clamp(max=cap), high=ratio > cap)


def sequence_tis(train_lp: Tensor, rollout_lp: Tensor, mask: Tensor, cap: float) -> Correction:
    """Truncated importance sampling per sequence.

        w = min(prod_t rho_t, cap)

    Unbiased but for the truncation; its variance grows with length. Arguments and errors as for
    `token_tis`; caps of 2 to 10 are usual. A row must hold its whole sequence.
    """
    _require_cap(cap)
    mask, log_ratio = _log_ratio(train_lp, rollout_lp, mask)
    ratio = _exp(log_ratio.sum(dim=1, keepdim=True)).expand_as(mask)
    return _correction(mask, kept=mask, weights=ratio.clamp(max=cap), high=ratio > cap)


def sequence_mis(train_lp: Tensor, rollout_lp: Tensor, mask: Tensor, cap: float) -> Correction:
    """Masked importance sampling per sequence: beyond the cap a sequence is dropped, not truncated.

        w = prod_t rho_t  if prod_t rho_t <= cap  else 0

    A ratio that large usually means a broken sequence rather than a good one. Arguments and errors
    as for `token_tis`; caps of 2 to 10 are usual. A row must hold its whole sequence.
    """
    _require_cap(cap)
    mask, log_ratio = _log_ratio(train_lp, rollout_lp, mask)
    ratio = _exp(log_ratio.sum(dim=1, keepdim=True)).expand_as(mask)
    return _correction(mask, kept=mask & (ratio <= cap), weights=ratio, high=ratio > cap)


def geometric_rejection(
    train_lp: Tensor, rollout_lp: Tensor, mask: Tensor, low: float, high: float
) -> Correction:
    """Reject sequences by the geometric mean of their ratios; weight 1 for the others.

        w = 1  if low <= exp(mean_t d_t) <= high  else 0

    Does not punish length, which a product of ratios does. Not an importance weight: chain
    `token_tis` after it for one.

    Args:
        train_lp: as for `token_tis`.
        rollout_lp: as for `token_tis`.
        mask: as for `token_tis`. A row must hold its whole sequence.
        low: lower bound, in (0, 1]; 0.999 is usual, 0.99 loose.
        high: upper bound, at least 1; 1.001 is usual, 1.01 loose.

    Raises:
        ValueError: as for `token_tis`; bounds that do not contain 1.
    """
    _require_range(low, high)
    mask, log_ratio = _log_ratio(train_lp, rollout_lp, mask)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = _exp(log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(mask)
    return _correction(
        mask,
        kept=mask & (ratio >= low) & (ratio <= high),
        weights=torch.ones_like(ratio),
        low=ratio < low,
        high=ratio > high,
    )


def icepop(
    train_lp: Tensor, rollout_lp: Tensor, mask: Tensor, low: float, high: float
) -> Correction:
    """Drop tokens whose ratio leaves the range on either side; the others keep their ratio.

        w_t = rho_t  if low <= rho_t <= high  else 0

    Args:
        train_lp: as for `token_tis`.
        rollout_lp: as for `token_tis`.
        mask: as for `token_tis`.
        low: lower bound, in (0, 1]; 0.5 is usual.
        high: upper bound, at least 1; 5 in the paper, 2 is used as well.

    Raises:
        ValueError: as for `token_tis`; bounds that do not contain 1.
    """
    _require_range(low, high)
    mask, log_ratio = _log_ratio(train_lp, rollout_lp, mask)
    ratio = _exp(log_ratio)
    return _correction(
        mask,
        kept=mask & (ratio >= low) & (ratio <= high),
        weights=ratio,
        low=ratio < low,
        high=ratio > high,
    )


def _log_ratio(train_lp: Tensor, rollout_lp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask as bool, and d [B, S] in float64, detached, 0 outside the mask."""
    mask = response_mask(mask, train_lp=train_lp, rollout_lp=rollout_lp)
    full_precision(train_lp=train_lp, rollout_lp=rollout_lp)
    log_ratio = train_lp.detach().double() - rollout_lp.detach().double()
    log_ratio = log_ratio.masked_fill(~mask, 0.0)
    not_finite = (~torch.isfinite(log_ratio)).nonzero()
    if not_finite.numel():
        b, s = not_finite[0].tolist()
        raise ValueError(
            f"log-probs at [{b}, {s}] are {train_lp[b, s].item()} (train) and "
            f"{rollout_lp[b, s].item()} (rollout), expected finite numbers; look for NaN weights "
            "after the last weight sync, or mask the position."
        )
    return mask, log_ratio


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _correction(
    mask: Tensor,
    *,
    kept: Tensor,
    weights: Tensor,
    high: Tensor,
    low: Tensor | None = None,
) -> Correction:
    weights = weights.masked_fill(~kept, 0.0)
    return Correction(
        weights=weights.float(),
        mask=kept,
        metrics=_metrics(mask, kept, weights, high, torch.zeros_like(mask) if low is None else low),
    )


def _metrics(
    mask: Tensor, kept: Tensor, weights: Tensor, high: Tensor, low: Tensor
) -> dict[str, float]:
    counts = torch.stack(
        [
            mask.sum(),
            kept.sum(),
            (high & mask).sum(),
            (low & mask).sum(),
            mask.any(dim=1).sum(),
            (mask & ~kept).any(dim=1).sum(),
        ]
    )
    tokens, num_kept, num_high, num_low, sequences, sequences_cut = counts.tolist()
    if tokens == 0:
        return {}
    of_kept = weights[kept] if num_kept else weights.new_zeros(1)
    mean, largest, smallest = torch.stack([of_kept.mean(), of_kept.max(), of_kept.min()]).tolist()
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_max": largest,
        "rollout_corr/rollout_is_min": smallest,
        "rollout_corr/rollout_is_ratio_fraction_high": num_high / tokens,
        "rollout_corr/rollout_is_ratio_fraction_low": num_low / tokens,
        "rollout_corr/rollout_rs_masked_fraction": (tokens - num_kept) / tokens,
        "rollout_corr/rollout_rs_seq_masked_fraction": sequences_cut / sequences,
    }


def _require_cap(cap: float) -> None:
    if not cap >= 1:
        raise ValueError(f"cap is {cap}, expected at least 1, the ratio of an on-policy token.")


def _require_range(low: float, high: float) -> None:
    if not 0 < low <= 1 <= high:
        raise ValueError(
            f"the range is [{low}, {high}], expected 0 < low <= 1 <= high: it must contain 1, the "
            "ratio of an on-policy token."
        )
