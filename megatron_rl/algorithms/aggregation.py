"""From per-token losses to the one scalar that is differentiated.

Why this is a module of its own: how tokens are weighted is part of the algorithm (it is the whole
difference between GRPO, DAPO and Dr. GRPO once advantages are given), while how a mini-batch is cut
into micro-batches and ranks is not. A mean taken per micro-batch mixes the two up: its result
depends on the cut. Here every token's weight is a function of the *global* mini-batch, so a
micro-batch only adds its share and the parts always sum to the same loss and gradient.

The global totals:

- `total_tokens`: response tokens of the mini-batch;
- `total_sequences`: samples of the mini-batch with at least one response token. A row without one
  (padding of the batch, a sample masked out as a whole) is not a sequence.

Both are counted on the response mask *before* anything is left out of the computation: a sample
that is skipped since its advantage is zero still counts, for its loss is zero, not absent; a token
that a correction rule rejects still counts too, because rejection is an importance weight of zero.
Pass the rejecting weight in the values, and the response mask as `mask`.

This module does not all-reduce the totals and does not undo the averaging that a data-parallel
wrapper or a pipeline schedule applies; the caller does.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl.algorithms._checks import response_mask

AggregationMode = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
"""With l[b, t] the token losses, T tokens, N sequences, |b| the tokens of sequence b:

- `token-mean`: (1/T) sum l. DAPO, arXiv 2503.14476.
- `seq-mean-token-sum`: (1/N) sum l. The policy gradient of whole sequences.
- `seq-mean-token-mean`: (1/N) sum_b (1/|b|) sum_t l. GRPO, arXiv 2402.03300.
- `seq-mean-token-sum-norm`: (1/(N L)) sum l, L a constant length. Dr. GRPO, arXiv 2503.20783.
"""

AGGREGATION_MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)


def batch_totals(mask: Tensor) -> tuple[int, int]:
    """Count the response tokens and the sequences that have at least one.

    Args:
        mask: [B, S] bool or 0/1. Any leading part of the mini-batch; totals of parts add up.

    Returns:
        `(tokens, sequences)`.
    """
    lengths_B = response_mask(mask).sum(dim=1)
    tokens, sequences = torch.stack([lengths_B.sum(), (lengths_B > 0).sum()]).tolist()
    return tokens, sequences


def token_weights(
    mask: Tensor,
    mode: AggregationMode,
    *,
    total_tokens: int,
    total_sequences: int,
    norm_length: int | None = None,
) -> Tensor:
    """The weight with which each token's loss enters the loss of the global mini-batch.

    The loss is `(weights * token_losses).sum()`, added over all micro-batches and ranks.

    Args:
        mask: [B, S] bool or 0/1, the response tokens of any part of the mini-batch. A row must hold
            its whole sequence: `seq-mean-token-mean` divides by the row's tokens.
        mode: one of `AGGREGATION_MODES`.
        total_tokens: response tokens of the global mini-batch.
        total_sequences: sequences with at least one response token in the global mini-batch.
        norm_length: the maximum response length of the run, in tokens. Read by
            `seq-mean-token-sum-norm` only, which requires it: the padded length S would do for a
            default, but it changes from batch to batch.

    Returns:
        [B, S] float32, zero outside the mask.

    Raises:
        ValueError: unknown mode, a total or `norm_length` that is missing or not positive.
    """
    mask_BS = response_mask(mask)
    if mode not in AGGREGATION_MODES:
        raise ValueError(
            f"aggregation mode is {mode!r}, expected one of: {', '.join(AGGREGATION_MODES)}."
        )
    name, total = (
        ("total_tokens", total_tokens)
        if mode == "token-mean"
        else ("total_sequences", total_sequences)
    )
    if total <= 0:
        raise ValueError(
            f"{name} is {total}, expected at least 1 for {mode}; "
            "skip the update of a mini-batch without response tokens."
        )
    # float64 until the last step: the quotient is then the nearest float32 to the exact weight.
    weights_BS = mask_BS.double() / total
    if mode == "seq-mean-token-mean":
        weights_BS = weights_BS / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(
                f"norm_length is {norm_length}, expected the maximum response length in tokens for "
                "seq-mean-token-sum-norm; set it from the run's response limit."
            )
        weights_BS = weights_BS / norm_length
    return weights_BS.float()


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: AggregationMode,
    *,
    denominator: int | None = None,
    norm_length: int | None = None,
) -> Tensor:
    """Reduce per-token values to the mini-batch's scalar.

    Args:
        values: [B, S] float32, per-token losses. What stands outside the mask is not read.
        mask: [B, S] bool or 0/1, the response tokens.
        mode: one of `AGGREGATION_MODES`.
        denominator: the global total that `mode` divides by: response tokens for `token-mean`,
            sequences for the others. Default: counted in `mask`, which is right only when `values`
            is the whole mini-batch.
        norm_length: see `token_weights`.

    Returns:
        Scalar float32: the loss, or this part's share of it when `denominator` is given.

    Raises:
        ValueError: as `token_weights`; a shape that differs from the mask's.
    """
    mask_BS = response_mask(mask, values=values)
    tokens, sequences = batch_totals(mask_BS) if denominator is None else (denominator, denominator)
    weights_BS = token_weights(
        mask_BS, mode, total_tokens=tokens, total_sequences=sequences, norm_length=norm_length
    )
    # where, not a product: padding may hold NaN, and NaN * 0 is NaN.
    return (values.masked_fill(~mask_BS, 0.0) * weights_BS).sum()
