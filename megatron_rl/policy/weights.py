"""Weights between a live Megatron model and Hugging Face tensors, by the parameter map.

Loading fills every parameter from a reader, one tensor in memory at a time; anything missing,
unexpected, misshapen or non-finite is an error that names it. Nothing here touches a file.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

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
        By local parameter name, every shard of the checkpoint if it is finer than the parameters'
        dtype (the FP32 master weights start from it), else nothing.

    Raises:
        ValueError: The checkpoint does not fit the model, or a tensor holds NaN or Inf.
    """
    unrounded: dict[str, torch.Tensor] = {}
    exact = True
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
            exact &= torch.promote_types(shard.dtype, parameter.dtype) == parameter.dtype
            if not exact:
                unrounded[local_name] = shard
    assert exact or len(unrounded) == sum(1 for _ in model.parameters()), "a mixed-dtype checkpoint"
    return unrounded


def export_hf_weights(
    model: torch.nn.Module, parameters: ParameterMap, layout: ParallelLayout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's (Hugging Face name, tensor) pairs in map order.

    Tensors may share memory with the parameters; a consumer that keeps one must copy it.
    """
    if layout.tp_size > 1 or layout.pp_size > 1:
        raise ValueError(
            "weights are exported from one TP and PP rank only; set "
            "policy.tensor_model_parallel_size and pipeline_model_parallel_size to 1"
        )
    named = dict(named_parameters(model))
    parameters.check_megatron_keys(named)
    for entry in parameters:
        full = entry.unshard([named[entry.megatron_name].detach()])
        yield from entry.to_hf(full).items()
