"""Core attention with the rollout's own kernel in the forward pass, and torch's gradient.

The forward pass computes every token as the rollout engine does (one request a token, see
:mod:`megatron_rl.platforms.cpu_attention`), so its bits are the sampler's. The backward pass
differentiates the same function, ``softmax(q k^T) v``, which it computes anew in FP32:

    P  = softmax(scale * q k^T)        dV = P^T dO        dP = dO V^T
    dS = P * (dP - rowsum(dP * P))     dQ = scale * dS K  dK = scale * dS^T Q

Gradients are those of ordinary attention, up to the rounding that any two kernels differ by. A
group of many tokens is differentiated by torch instead, which holds no score matrix.

Legend: T stream tokens, N query heads, G key/value heads, R = N / G, D head dimension, L tokens of
one group.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.platforms.cpu_attention import BLOCK_SIZE_TOKENS, PagedStream, paged_attention
from megatron_rl.policy.attention_masks import tree_mask
from megatron_rl.policy.packing import GroupSpan

Spans = tuple[GroupSpan, ...]
DENSE_LIMIT_TOKENS = 512
"""A group up to this length is differentiated through its score matrix."""
TorchAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Spans], torch.Tensor]


class SharedAttention(torch.autograd.Function):
    """``apply(query [T, N, D], key [T, G, D], value [T, G, D], spans, scale, torch_attention)``."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: Spans,
        scale: float | None,
        torch_attention: TorchAttention,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.spans, ctx.scale, ctx.torch_attention = spans, scale, torch_attention
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        return paged_attention(query, key, value, page_stream(spans), scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # noqa: D102
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in inputs]
        scale = 1.0 / math.sqrt(inputs[0].shape[-1]) if ctx.scale is None else ctx.scale
        for span in ctx.spans:
            own = slice(span.start, span.start + span.length)
            pieces = [x[own] for x in inputs]
            if span.length <= DENSE_LIMIT_TOKENS:
                mask = tree_mask(span.prompt_length, span.response_lengths)
                found = dense_gradients(*pieces, grad[own], mask, scale)
            else:
                found = _torch_gradients(pieces, grad[own], span, ctx.torch_attention)
            for whole, piece in zip(gradients, found, strict=True):
                whole[own] = piece
        return (*gradients, None, None, None)


def dense_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the attention of one group, through its score matrix.

    Args:
        query: ``[L, N, D]``.
        key: ``[L, G, D]``.
        value: ``[L, G, D]``.
        grad: ``[L, N, D]``, of the output.
        mask: ``[L, L]`` bool, true where the query (row) sees the key (column).
        scale: Multiplies the scores.

    Returns:
        Gradients of query, key and value in FP32, of their shapes.
    """
    length, heads, dim = query.shape
    groups = key.shape[1]

    def by_group(x: torch.Tensor) -> torch.Tensor:
        """``[L, heads, D]`` to ``[G, R * L, D]``: the query heads of a group share its keys."""
        split = x.float().view(length, groups, -1, dim)
        return split.permute(1, 2, 0, 3).reshape(groups, -1, dim)

    q, k, v, d_out = map(by_group, (query, key, value, grad))
    scores = torch.bmm(q, k.mT).mul_(scale).view(groups, -1, length, length)
    probs = scores.masked_fill_(~mask, -math.inf).softmax(-1).view(groups, -1, length)
    d_value = torch.bmm(probs.mT, d_out)
    d_probs = torch.bmm(d_out, v.mT)
    inner = torch.linalg.vecdot(d_probs, probs)[..., None]
    d_scores = d_probs.sub_(inner).mul_(probs).mul_(scale)
    d_query = torch.bmm(d_scores, k)
    d_key = torch.bmm(d_scores.mT, q)
    return (
        d_query.view(groups, -1, length, dim).permute(2, 0, 1, 3).reshape(length, heads, dim),
        d_key.transpose(0, 1),
        d_value.transpose(0, 1),
    )


def _torch_gradients(
    inputs: list[torch.Tensor], grad: torch.Tensor, span: GroupSpan, attention: TorchAttention
) -> tuple[torch.Tensor, ...]:
    """The same by torch's attention, for a group whose score matrix would be large."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = attention(*leaves, (replace(span, start=0),))
    return torch.autograd.grad(output, leaves, grad)


@functools.lru_cache(maxsize=64)
def page_stream(spans: Spans) -> PagedStream:
    """Lays a stream of prompt groups out in cache blocks.

    A group's responses share the whole blocks of its prompt. The rest of the prompt, which fills
    its last block only in part, is repeated in front of each response.
    """
    size = BLOCK_SIZE_TOKENS
    source: list[int] = []
    slots: list[int] = []
    tables: list[list[int]] = []
    num_keys: list[int] = []
    num_blocks = 0

    def write(tokens: list[int]) -> list[int]:
        """Fills new blocks with the tokens; returns the blocks."""
        nonlocal num_blocks
        first = num_blocks
        num_blocks += -(-len(tokens) // size)
        source.extend(tokens)
        slots.extend(range(first * size, first * size + len(tokens)))
        return list(range(first, num_blocks))

    for span in spans:
        prompt = list(range(span.start, span.start + span.prompt_length))
        blocks = write(prompt)
        tables += [blocks] * len(prompt)
        num_keys += range(1, len(prompt) + 1)
        whole = len(prompt) // size
        first = span.start + span.prompt_length
        for length in span.response_lengths:
            if length:
                own = write([*prompt[whole * size :], *range(first, first + length)])
                tables += [blocks[:whole] + own] * length
                num_keys += range(len(prompt) + 1, len(prompt) + length + 1)
                first += length
    width = max(map(len, tables))
    return PagedStream(
        source=torch.tensor(source),
        slots=torch.tensor(slots),
        block_table=torch.tensor(
            [row + [0] * (width - len(row)) for row in tables], dtype=torch.int32
        ),
        num_keys=torch.tensor(num_keys, dtype=torch.int32),
        num_blocks=num_blocks,
    )
