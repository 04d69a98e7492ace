"""Core attention with the rollout's own kernel in the forward pass, and torch's gradient.

The forward pass computes every token as the rollout engine does (one request a token, see
:mod:`megatron_rl.platforms.cpu_attention`), so its bits are the sampler's. The backward pass
differentiates the same function, ``softmax(q k^T) v``, by recomputing it with torch: gradients are
those of ordinary attention, up to the rounding that any two kernels differ by.

Legend: T stream tokens, N query heads, G key/value heads, D head dimension.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.platforms.cpu_attention import BLOCK_SIZE_TOKENS, PagedStream, paged_attention
from megatron_rl.policy.packing import GroupSpan

Spans = tuple[GroupSpan, ...]
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
        ctx.spans, ctx.torch_attention = spans, torch_attention
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        return paged_attention(query, key, value, page_stream(spans), scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # noqa: D102
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.torch_attention(*inputs, ctx.spans)
        return (*torch.autograd.grad(output, inputs, grad), None, None, None)


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
