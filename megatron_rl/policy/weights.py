"""Weights between a live Megatron model and Hugging Face tensors, by the parameter map.

Loading fills every parameter from a reader, one tensor in memory at a time; anything missing,
unexpected, misshapen or non-finite is an error that names it. Nothing here touches a file.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.models import ParameterMap
from megatron_rl.policy.parallel import ParallelLayout


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a pipeline stage under their global names (layer numbers over all stages)."""
    offset = _layer_offset(model)
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            prefix, number, rest = name[: len("decoder.layers.")], *name[15:].split(".", 1)
            name = f"{prefix}{int(number) + offset}.{rest}"
        yield name, parameter


def _layer_offset(model: torch.nn.Module) -> int:
    layers = model.decoder.layers  # type: ignore[union-attr]
    return layers[0].layer_number - 1 if len(layers) else 0  # type: ignore[index,operator,arg-type]


def mark_tensor_parallel(model: torch.nn.Module, parameters: ParameterMap) -> None:
    """Tells Megatron which parameters are shards of a larger one.

    Megatron does so when it initialises weights, which is skipped here. Without the mark the
    gradient norm would count a sharded weight on the first TP rank only, and clipping would follow.
    """
    for name, parameter in named_parameters(model):
        axis = parameters.entry(name).tp_axis
        if axis is not None:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = axis  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]


def load_hf_weights(
    model: torch.nn.Module,
    parameters: ParameterMap,
    tensors: Mapping[str, torch.Tensor],
    keys: Iterable[str],
    layout: ParallelLayout,
) -> dict[str, torch.Tensor]:
    """Fills this rank's parameters from Hugging Face tensors.

    Args:
        model: Bare Megatron model of this pipeline stage.
        parameters: The family's map.
        tensors: Lazy mapping from name to tensor.
        keys: All names of the checkpoint, repeats included.
        layout: This rank's place.

    Returns:
        By local parameter name, every shard of the checkpoint if any is finer than the parameters'
        dtype (the FP32 master weights start from them), else nothing.

    Raises:
        ValueError: The checkpoint does not fit the model, or a tensor holds NaN or Inf.
    """
    unrounded: dict[str, torch.Tensor] = {}
    local_names = (name for name, _ in model.named_parameters())
    parameters.check_hf_keys(keys)
    parameters.check_tp(layout.tp_size)
    with torch.no_grad():
        for local_name, (name, parameter) in zip(local_names, named_parameters(model), strict=True):
            entry = parameters.entry(name)
            shard = entry.shard(
                entry.to_megatron(tensors), tp_rank=layout.tp_rank, tp_size=layout.tp_size
            )
            if not torch.isfinite(shard.sum(dtype=torch.float32)):
                raise ValueError(
                    f"{', '.join(entry.hf_names)} holds NaN or Inf; the checkpoint is damaged"
                )
            assert shard.shape == parameter.shape, (name, shard.shape, parameter.shape)
            parameter.copy_(shard)
            if torch.promote_types(shard.dtype, parameter.dtype) != parameter.dtype:
                unrounded[local_name] = shard.contiguous()
    if unrounded:
        # Of a checkpoint of several dtypes, the parameters that needed no rounding.
        for local_name, parameter in model.named_parameters():
            unrounded.setdefault(local_name, parameter.detach())
    return unrounded


def export_hf_weights(
    model: torch.nn.Module,
    parameters: ParameterMap,
    layout: ParallelLayout,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the whole model's (Hugging Face name, tensor) pairs in map order, on every rank.

    A collective: every rank of the TP and PP groups must run it to its end. Parameters are gathered
    one at a time, so a rank never holds more than one full parameter besides its own shard. Where
    nothing is to be gathered, tensors share the parameters' memory; a consumer that keeps one must
    copy it.

    Args:
        model: Bare Megatron model of this pipeline stage.
        parameters: The family's map.
        layout: This rank's place.
        dtype: Dtype of the parameters, which stages without one must know.
    """
    named = {name: parameter.detach() for name, parameter in named_parameters(model)}
    owners = _owners(named, layout)
    parameters.check_megatron_keys(owners)
    for entry in parameters:
        owner = owners[entry.megatron_name]
        if owner == layout.pp_rank:
            full = entry.unshard(_tp_shards(named[entry.megatron_name], entry.tp_axis, layout))
        else:
            device = next(iter(named.values())).device
            full = torch.empty(entry.shape, dtype=dtype, device=device)
        if layout.pp_size > 1:
            full = _broadcast_from_stage(full, owner)
        yield from entry.to_hf(full).items()


def _owners(named: Mapping[str, torch.Tensor], layout: ParallelLayout) -> dict[str, int]:
    """First pipeline stage that holds each parameter."""
    if layout.pp_size == 1:
        return dict.fromkeys(named, 0)
    held: list[list[str]] = [[] for _ in range(layout.pp_size)]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_gather_object(held, list(named), group=group)
    owners: dict[str, int] = {}
    for stage, names in enumerate(held):
        for name in names:
            owners.setdefault(name, stage)
    return owners


def _tp_shards(
    shard: torch.Tensor, tp_axis: int | None, layout: ParallelLayout
) -> list[torch.Tensor]:
    if layout.tp_size == 1 or tp_axis is None:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(layout.tp_size)]
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _broadcast_from_stage(full: torch.Tensor, stage: int) -> torch.Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    full = full.contiguous()
    dist.broadcast(full, src=dist.get_global_rank(group, stage), group=group)
    return full
