"""Core attention over packed prompt groups, by torch's scaled-dot-product attention.

Megatron's own ``DotProductAttention`` refuses packed input and materialises the scores; Transformer
Engine's is CUDA only. This module serves the CPU, and any device for prompt groups, whose attention
pattern is a
tree: a response sees its prompt and itself, never its siblings.

Legend: T stream tokens, N query heads, G key/value heads, D head dimension, L tokens of one group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.policy.attention_masks import suffix_mask, tree_mask
from megatron_rl.policy.packing import GroupSpan

Spans = tuple[GroupSpan, ...]
DENSE_LIMIT_TOKENS = 512
"""A group up to this length is one call with a dense mask; a longer one is a call a response, which
computes no score between siblings."""


@dataclass
class PackedGroupParams(PackedSeqParams):
    """Carries the group spans through Megatron's layers to the core attention.

    ``qkv_format`` is not ``thd``, so that Megatron keeps ``[T, 1, ...]`` shapes and applies the
    rotary embedding it was given, position by position.
    """

    spans: tuple[GroupSpan, ...] = ()

    def __post_init__(self) -> None:
        """Declares the layout ``[s, b, h, d]`` with ``b = 1``."""
        self.qkv_format = "sbhd"


class GroupAttention(MegatronModule):
    """Causal attention within each group of a packed stream; drop-in for ``core_attention``.

    With ``rollout_kernel`` the forward pass is the rollout engine's own kernel, bit for bit.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        rollout_kernel: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self", attention_type
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        self.softmax_scale = softmax_scale
        self.rollout_kernel = rollout_kernel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedGroupParams | None = None,
    ) -> torch.Tensor:
        """Attends within groups.

        Args:
            query: ``[T, 1, N, D]``.
            key: ``[T, 1, G, D]``.
            value: ``[T, 1, G, D]``.
            attention_mask: Unused; the pattern follows from the spans.
            attn_mask_type: Unused.
            attention_bias: Must be None.
            packed_seq_params: The spans of the stream.

        Returns:
            ``[T, 1, N * D]``.
        """
        assert isinstance(packed_seq_params, PackedGroupParams) and attention_bias is None
        spans = packed_seq_params.spans
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        if self.rollout_kernel:
            from megatron_rl.policy.shared_attention import SharedAttention

            output = SharedAttention.apply(
                q, k, v, spans, self.softmax_scale, self._torch_attention
            )
        else:
            output = self._torch_attention(q, k, v, spans)
        assert output.shape[0] == query.shape[0], "the spans do not cover the stream"
        return output.reshape(query.shape[0], 1, -1)

    def _torch_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans
    ) -> torch.Tensor:
        """``[T, heads, D]`` operands to ``[T, N, D]``."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        pieces = [
            piece for span in spans for piece in _attend_group(q, k, v, span, self.softmax_scale)
        ]
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return output.transpose(0, 1)


def _attend_group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: GroupSpan, scale: float | None
) -> Iterator[torch.Tensor]:
    """Yields the attention output of one group, in stream order, as ``[N, length, D]`` pieces."""
    whole = slice(span.start, span.start + span.length)
    q, k, v = q[:, whole], k[:, whole], v[:, whole]
    if sum(1 for n in span.response_lengths if n) <= 1:
        yield _sdpa(q, k, v, None, scale)
    elif span.length <= DENSE_LIMIT_TOKENS:
        yield _sdpa(q, k, v, tree_mask(span.prompt_length, span.response_lengths), scale)
    else:
        prompt = span.prompt_length
        yield _sdpa(q[:, :prompt], k[:, :prompt], v[:, :prompt], None, scale)
        start = prompt
        for length in span.response_lengths:
            if length:
                own = slice(start, start + length)
                keys = torch.cat((k[:, :prompt], k[:, own]), dim=1)
                values = torch.cat((v[:, :prompt], v[:, own]), dim=1)
                yield _sdpa(q[:, own], keys, values, suffix_mask(prompt, length), scale)
            start += length


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of ``[heads, length, D]`` operands; causal where no mask is given."""
    return F.scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=None if mask is None else mask.to(q.device),
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
    )[0]
