"""Makes a live vLLM model on a CPU compute the trainer's operators, bit for bit.

The products of both engines agree already (one oneDNN kernel, given the same operands). Three
operators between them round differently, and are aligned here, on the modules of one engine only:

- ``norm``: vLLM norms the unrounded sum of residual and branch; the trainer, as Hugging Face, the
  rounded one. The rollout follows the trainer.
- ``rope``: vLLM's kernel multiplies in FP32; the trainer rounds every product. The rollout follows.
- ``attention``: the trainer calls vLLM's own kernel, and both present every token as a request of
  its own (:mod:`megatron_rl.platforms.cpu_attention`).

The linear layers get two guards: a single row is computed as two (oneDNN picks another kernel for
one row of a large weight), and the bias is added to the rounded product, as the trainer adds it.
"""

import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from megatron_rl.platforms.cpu_attention import per_token_schedule


def share_operators(model_runner: Any, operators: Collection[str]) -> None:
    """Aligns the operators named (of ``norm``, ``rope``, ``attention``); safe to repeat.

    To be repeated after every weight update, which packs the linear layers anew.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    model = model_runner.get_model()
    for module in model.modules():
        if "norm" in operators and isinstance(module, RMSNorm):
            module._forward_method = types.MethodType(_norm_of_rounded_sum, module)
        if "rope" in operators and isinstance(module, RotaryEmbedding):
            module._forward_method = module.forward_native
        linear = getattr(module, "cpu_linear", None)
        if operators and linear is not None and not isinstance(linear, _GuardedLinear):
            module.cpu_linear = _GuardedLinear(linear)
    if "attention" in operators:
        for builder in _metadata_builders(model_runner):
            builder.build = types.MethodType(_build_per_token, builder)


def live_operators(model_runner: Any) -> tuple[str, ...]:
    """The operators that the live model shares with the trainer."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    modules = list(model_runner.get_model().modules())
    norms = [m._forward_method for m in modules if isinstance(m, RMSNorm)]
    ropes = [m for m in modules if isinstance(m, RotaryEmbedding)]
    builds = [builder.build for builder in _metadata_builders(model_runner)]
    found = []
    if all(getattr(method, "__func__", None) is _norm_of_rounded_sum for method in norms):
        found.append("norm")
    if all(rope._forward_method == rope.forward_native for rope in ropes):
        found.append("rope")
    if all(getattr(build, "__func__", None) is _build_per_token for build in builds):
        found.append("attention")
    return tuple(found)


def _norm_of_rounded_sum(module: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is None:
        return module.forward_native(x)
    total = x + residual
    return module.forward_native(total), total


class _GuardedLinear:
    """A CPU linear whose rows do not depend on how many there are."""

    def __init__(self, inner: Callable[..., torch.Tensor]) -> None:
        self._inner = inner

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.numel() == x.shape[-1]:
            pair = x.reshape(1, -1).repeat(2, 1)
            output = self._inner(pair, weight, None)[:1].reshape(*x.shape[:-1], -1)
        else:
            output = self._inner(x, weight, None)
        # Beside a matrix packed for AMX, vLLM keeps the bias in FP32: the same values.
        return output if bias is None else output + bias.to(output.dtype)


def _metadata_builders(model_runner: Any) -> list[Any]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    builders = [
        builder
        for groups in model_runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]
    assert builders and all(isinstance(b, CPUAttentionMetadataBuilder) for b in builders)
    return builders


def _build_per_token(
    builder: Any, common_prefix_len: int, batch: Any, fast_build: bool = False
) -> Any:
    """``CPUAttentionMetadataBuilder.build`` with every token a request of one query."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    tokens, starts = batch.num_actual_tokens, batch.query_start_loc
    lengths = (starts[1:] - starts[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offset = torch.arange(tokens) - starts[:-1].long()[request]
    num_keys = (batch.seq_lens.long() - lengths)[request] + offset + 1
    num_keys = num_keys.to(batch.seq_lens.dtype)
    own_starts = torch.arange(tokens + 1, dtype=starts.dtype)
    return CPUAttentionMetadata(
        num_actual_tokens=tokens,
        max_query_len=1,
        query_start_loc=own_starts,
        max_seq_len=batch.max_seq_len,
        seq_lens=num_keys,
        block_table=batch.block_table_tensor[request].contiguous(),
        slot_mapping=batch.slot_mapping,
        scheduler_metadata=per_token_schedule(
            own_starts,
            num_keys,
            builder.num_heads,
            builder.num_kv_heads,
            builder.head_dim,
            builder.dtype,
            builder.isa,
        ),
        causal=True,
    )
