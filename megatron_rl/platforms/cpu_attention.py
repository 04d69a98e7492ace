"""The rollout's attention kernel on a CPU, called on a packed stream of the trainer.

vLLM's CPU kernel computes one output row from (query, cached keys and values, number of keys) with
FP32 scores, probabilities and sums. Its bits depend on how queries are grouped into *requests*:
prefill, chunked prefill and decode cut the keys into tiles differently. Given every token as a
request of its own, with one query and ``position + 1`` keys, the row depends on nothing but its own
operands, and so is the same in the trainer and in the rollout, whatever the batch, the prefix cache
or the number of threads. Both sides do so when they share the operator
(:mod:`megatron_rl.rollout.shared_operators` is the other half).

The kernel reads keys and values from a paged cache; here it is a temporary one, filled by the
kernel's own packing routine. Forward only: the backward pass is the caller's.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_SIZE_TOKENS = 32
"""Tokens of one block of the cache, here and in the rollout engine."""


@dataclass(frozen=True, kw_only=True)
class PagedStream:
    """Where a packed stream's keys and values lie in the cache, and which of them a token sees."""

    source: torch.Tensor
    """``[E]`` int64: stream token whose key and value fill each written slot."""
    slots: torch.Tensor
    """``[E]`` int64: slot number (block number x block size + offset)."""
    block_table: torch.Tensor
    """``[T, max_blocks]`` int32: blocks that each token reads, in order."""
    num_keys: torch.Tensor
    """``[T]`` int32: keys that each token sees, itself included."""
    num_blocks: int
    """Blocks of the cache."""


def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: PagedStream, scale: float
) -> torch.Tensor:
    """Attention of every token of a stream, one request a token.

    Args:
        query: ``[T, N, D]`` BF16, FP16 or FP32.
        key: ``[T, G, D]``, same dtype.
        value: ``[T, G, D]``, same dtype.
        stream: The pattern.
        scale: Multiplies the scores.

    Returns:
        ``[T, N, D]``.
    """
    ops = _ops()
    tokens, heads, head_dim = query.shape
    groups = key.shape[1]
    isa = attention_isa(query.dtype, head_dim)
    cache = key.new_zeros(stream.num_blocks, groups, 2 * BLOCK_SIZE_TOKENS, head_dim)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key[stream.source], value[stream.source], key_cache, value_cache, stream.slots, isa
    )
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    ops.cpu_attention_with_kv_cache(
        query=query.contiguous(),
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=stream.num_keys,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=stream.block_table,
        softcap=0,
        scheduler_metadata=per_token_schedule(
            starts, stream.num_keys, heads, groups, head_dim, query.dtype, isa
        ),
        s_aux=None,
    )
    return output


def per_token_schedule(
    starts: torch.Tensor,
    num_keys: torch.Tensor,
    heads: int,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    isa: str,
) -> torch.Tensor:
    """The kernel's work plan for one request a token; keys are never split over threads."""
    return _ops().cpu_attn_get_scheduler_metadata(
        num_reqs=len(num_keys),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        seq_lens=num_keys,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )


def attention_isa(dtype: torch.dtype, head_dim: int) -> str:
    """Name of the kernel's variant for this processor, as the rollout engine chooses it."""
    _ops()
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, BLOCK_SIZE_TOKENS, head_dim, "auto"))


@functools.cache
def _ops() -> Any:
    """The compiled operators of vLLM; needs no engine."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return _custom_ops
