"""Weights between a live Megatron model and Hugging Face tensors, by the parameter map.

Loading fills every parameter from a reader, one tensor in memory at a time; anything missing,
unexpected, misshapen or non-finite is an error that names it. Nothing here touches a file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.models import ParameterMap
from megatron_rl.models.entry import ParameterEntry
from megatron_rl.policy.fp8_linear import block_scaled_linears
from megatron_rl.policy.node_reading import NodeReader, node_group
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.te_export import is_quantised_tensor, plain_tensor
from megatron_rl.precision import BlockFormat, LinearPlan, PrecisionFlow, torch_dtype
from megatron_rl.precision.engines import element_dtype
from megatron_rl.precision.wire import encode, scale_name


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a pipeline stage under their global names (layer numbers over all stages)."""
    offset = layer_offset(model)
    for name, parameter in model.named_parameters():
        yield global_name(name, offset), parameter


def global_name(name: str, offset: int) -> str:
    """A stage's name with the layer counted over all stages."""
    layers = "decoder.layers."
    if not name.startswith(layers):
        return name
    number, rest = name.removeprefix(layers).split(".", 1)
    return f"{layers}{int(number) + offset}.{rest}"


def layer_offset(model: torch.nn.Module) -> int:
    """Layers on earlier pipeline stages."""
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

    A collective: each tensor is read by one rank of a machine, which sends it to the others.

    Args:
        model: Bare Megatron model of this pipeline stage.
        parameters: The family's map.
        tensors: Lazy mapping from name to tensor.
        keys: All names of the checkpoint, repeats included.
        layout: This rank's place.

    Returns:
        By local parameter name, every shard of the checkpoint if any is finer than its parameter
        (the FP32 master weights start from them), else nothing.

    Raises:
        ValueError: The checkpoint does not fit the model, or a tensor holds NaN or Inf.
    """
    unrounded: dict[str, torch.Tensor] = {}
    parameters.check_hf_keys(keys)
    parameters.check_tp(layout.tp_size)
    held: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    local_names = (name for name, _ in model.named_parameters())
    for local_name, (name, parameter) in zip(local_names, named_parameters(model), strict=True):
        held.setdefault(parameters.entry(name).megatron_name, []).append((local_name, parameter))
    first = next(model.parameters())
    with torch.no_grad(), node_group() as group:
        reader = NodeReader(tensors, held, group, first.device, first.dtype)
        for entry in parameters:
            unrounded |= _fill(reader, entry, held.get(entry.megatron_name, []), layout)
    if unrounded:
        # Of a checkpoint of several dtypes, the parameters that needed no rounding.
        for local_name, parameter in model.named_parameters():
            unrounded.setdefault(local_name, parameter.detach())
    return unrounded


def _fill(
    reader: NodeReader,
    entry: ParameterEntry,
    held: Sequence[tuple[str, torch.nn.Parameter]],
    layout: ParallelLayout,
) -> dict[str, torch.Tensor]:
    """Reads one entry into the parameters that hold it; returns shards finer than they are.

    The full tensor does not outlive the call: there is never more than one.
    """
    full = reader.read(entry)
    finer = {}
    for local_name, parameter in held:
        assert full is not None, entry.megatron_name
        shard = entry.shard(full, tp_rank=layout.tp_rank, tp_size=layout.tp_size)
        assert shard.shape == parameter.shape, (entry.megatron_name, shard.shape, parameter.shape)
        # Codes of a parameter in FP8 are made from the rounding to its nominal dtype.
        parameter.copy_(shard.to(parameter.device, parameter.dtype))
        is_finer = torch.promote_types(shard.dtype, parameter.dtype) != parameter.dtype
        if is_finer or is_quantised_tensor(parameter):
            kept = shard.cpu().contiguous()
            # A shard that is a view would keep the whole tensor.
            is_view = kept.untyped_storage().nbytes() > kept.nbytes
            finer[local_name] = kept.clone() if is_view else kept
    return finer


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
    named = {name: plain_tensor(parameter) for name, parameter in named_parameters(model)}
    owners = _owners(named, layout)
    parameters.check_megatron_keys(owners)
    gather = _Gatherer(layout, next(iter(named.values())).device)
    for entry in parameters:
        name = entry.megatron_name
        full = gather(entry, named.get(name), owners[name], entry.shape, dtype)
        yield from entry.to_hf(full).items()


def export_served_weights(
    model: torch.nn.Module,
    parameters: ParameterMap,
    layout: ParallelLayout,
    flow: PrecisionFlow,
    plan: LinearPlan,
) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`export_hf_weights`, in the format in which the flow serves each tensor.

    A layer that trains quantised yields the codes and scales that its products used: gathered and
    taken apart as bytes, never made again. A flow that only serves quantised weights makes the
    codes here, from the parameters.
    """
    named = {name: parameter.detach() for name, parameter in named_parameters(model)}
    offset = layer_offset(model)
    linears = {global_name(name, offset): linear for name, linear in block_scaled_linears(model)}
    owners = _owners(named, layout)
    parameters.check_megatron_keys(owners)
    gather = _Gatherer(layout, next(iter(named.values())).device)
    dtype = torch_dtype(flow.compute_dtype)
    for entry in parameters:
        name, owner = entry.megatron_name, owners[entry.megatron_name]
        module = name.removesuffix(".weight")
        if not (flow.trains_quantised and plan.is_quantised(module)):
            full = gather(entry, named.get(name), owner, entry.shape, dtype)
            for hf_name, tensor in entry.to_hf(full).items():
                yield from encode(hf_name, tensor, flow, plan)
            continue
        weight = linears[module].quantised_weight() if module in linears else None
        assert isinstance(flow.linear_weight, BlockFormat)
        element = element_dtype(flow.linear_weight.element)
        codes = gather(entry, weight and weight.codes, owner, entry.shape, element)
        rows, columns = flow.linear_weight.block_shape
        part_rows = [-(-shape[0] // rows) for shape in entry.hf_shapes]
        scale_shape = (sum(part_rows), -(-entry.shape[1] // columns))
        scales = gather(entry, weight and weight.scale_inv, owner, scale_shape, torch.float32)
        scale_parts = entry.layout.split(scales)
        for part, (hf_name, tensor) in enumerate(entry.to_hf(codes).items()):
            assert scale_parts[part].shape == (part_rows[part], scale_shape[1]), hf_name
            yield hf_name, tensor
            yield scale_name(hf_name), scale_parts[part]


class _Gatherer:
    """Makes whole what is split over TP ranks and lies on one pipeline stage."""

    def __init__(self, layout: ParallelLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device

    def __call__(
        self,
        entry: ParameterEntry,
        shard: torch.Tensor | None,
        owner: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The full tensor of an entry's layout, on every rank.

        Args:
            entry: Whose layout and split it has.
            shard: This rank's piece; None on other pipeline stages than ``owner``.
            owner: The stage that holds it.
            shape: Of the full tensor.
            dtype: Of the tensor.
        """
        # gloo and NCCL know no FP8; its bytes are sent as they are.
        wire_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        if owner == self._layout.pp_rank:
            assert shard is not None and shard.dtype == dtype, (entry.megatron_name, dtype)
            shards = _tp_shards(shard.view(wire_dtype), entry.tp_axis, self._layout)
            full = entry.layout.unshard(shards)
            assert tuple(full.shape) == shape, (entry.megatron_name, full.shape, shape)
        else:
            full = torch.empty(shape, dtype=wire_dtype, device=self._device)
        if self._layout.pp_size > 1:
            full = _broadcast_from_stage(full, owner)
        return full.view(dtype)


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
