"""Runs inside each vLLM worker: takes a new policy, in memory, and proves that all of it arrived.

vLLM's layerwise reload does the loading. What it does not do, and this does: account for every
tensor, refuse a fused layer that got only some of its parts (vLLM would serve NaN), and rebuild the
packed matrix of a tied head on CPU (vLLM would keep serving the old one).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_rl.precision.audit import ModelReport
from megatron_rl.precision.engines import SHARED_OPERATORS
from megatron_rl.rollout.report import describe_model
from megatron_rl.rollout.shared_operators import share_operators
from megatron_rl.rollout.types import NonFiniteWeights


class WorkerExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``; called through ``collective_rpc``."""

    model_runner: Any

    def rl_update_weights(
        self, stream: Iterable[tuple[str, torch.Tensor]], expected: frozenset[str]
    ) -> None:
        """Loads a complete checkpoint-format stream into the running model.

        Args:
            stream: (Hugging Face name, tensor) in layer order.
            expected: The names that make a complete policy.

        Raises:
            ValueError: A tensor is missing, unexpected, repeated or non-finite, or a layer is
                incomplete.
        """
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        config = self.model_runner.vllm_config.model_config
        seen: set[str] = set()
        own = _own_parameters(model)
        initialize_layerwise_reload(model)
        try:
            model.load_weights(_checked(stream, expected, seen))
            missing = sorted(expected - seen)
            if missing:
                raise ValueError(f"weight sync is incomplete; missing: {_listing(missing)}")
            incomplete = _incomplete_layers(model, own)
            if incomplete:
                raise ValueError(
                    f"rollout layers did not receive all their weights: {_listing(incomplete)}"
                )
        finally:
            finalize_layerwise_reload(model, config)
        rebuild_tied_head(model)
        self.rl_share_operators()

    def rl_report(self) -> ModelReport:
        """What the live model computes."""
        return describe_model(self.model_runner)

    def rl_share_operators(self) -> None:
        """Aligns the operators that the flow shares with the trainer, where it can: on a CPU."""
        from vllm.platforms import current_platform

        options = self.model_runner.vllm_config.additional_config
        operators = options.get(SHARED_OPERATORS, ())
        if operators and current_platform.is_cpu():
            share_operators(self.model_runner, operators)


def _checked(
    stream: Iterable[tuple[str, torch.Tensor]], expected: frozenset[str], seen: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in stream:
        if name not in expected:
            raise ValueError(f"weight sync sent {name!r}, which the rollout model does not have")
        if name in seen:
            raise ValueError(f"weight sync sent {name!r} twice")
        seen.add(name)
        if not _is_finite(tensor):
            raise NonFiniteWeights(f"{name!r} holds NaN or Inf after the update")
        yield name, tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # two codes are NaN, none is infinite
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    # A sum is finite only if every term is, and costs one read.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32)))


def _own_parameters(model: torch.nn.Module) -> dict[str, set[int]]:
    """Identities of the parameters that each layer itself holds; tied layers share one."""
    layers = {
        name: {id(parameter) for parameter in layer.parameters(recurse=False)}
        for name, layer in model.named_modules()
    }
    return {name: ids for name, ids in layers.items() if ids}


def _incomplete_layers(model: torch.nn.Module, own: dict[str, set[int]]) -> list[str]:
    """Layers that still wait for weights (complete ones were processed and reset).

    A layer whose parameters all belong to a complete layer too - a tied head - waits for nothing.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    waiting = {}
    for name in own:
        layer = model.get_submodule(name)
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        if info.load_numel < info.load_numel_total - _vocabulary_padding(layer):
            waiting[name] = f"{name} ({info.load_numel} of {info.load_numel_total} elements)"
    complete = set().union(*(ids for name, ids in own.items() if name not in waiting))
    return [text for name, text in waiting.items() if not own[name] <= complete]


def _vocabulary_padding(layer: torch.nn.Module) -> int:
    """Elements of an embedding or head that pad the vocabulary and that no checkpoint has."""
    shard = getattr(layer, "shard_indices", None)
    if shard is None:
        return 0
    padding_rows = shard.num_elements_padded - shard.num_org_elements
    return int(padding_rows * layer.embedding_dim)


def rebuild_tied_head(model: torch.nn.Module) -> None:
    """Packs the tied head anew on CPU, where its product uses a packed copy of the embedding."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _listing(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
