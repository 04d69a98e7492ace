"""What a written directory holds, decided from headers, before a tensor is read.

A model is written in its own order, and exactly: a source with a missing, unknown or misshapen
tensor is refused here. With a flow, the weights that the flow's plan quantises become codes and
scales, as weight sync would send them; a layer whose blocks vLLM would cut elsewhere stays as it
is.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.safetensors_writer import Piece, PlannedTensor
from checkpoints_tools.source import TensorSource, config_in_dtype
from megatron_rl.models import ParameterMap, linear_plan, parameter_map
from megatron_rl.precision import LinearPlan, PrecisionFlow, partition_violations
from megatron_rl.precision.engines import element_dtype, torch_dtype
from megatron_rl.precision.formats import BlockFormat
from megatron_rl.precision.wire import encode, is_quantised_weight, quantization_config, scale_name

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def checked_map(source: TensorSource) -> ParameterMap:
    """The parameter map of a source that has exactly the tensors of its config.

    Raises:
        ValueError: The architecture is not supported, names or shapes do not fit the config, or a
            tensor is not in a floating-point dtype of 16 or 32 bits.
    """
    parameters = parameter_map(source.config)
    try:
        parameters.check_hf_keys(source)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    for name, shape in parameters.hf_shapes.items():
        if source.shape(name) != shape:
            raise ValueError(
                f"{source.path} has {name} with shape {list(source.shape(name))}, but config.json "
                f"asks for {list(shape)}: they are not of one model."
            )
        if source.dtype(name) not in WEIGHT_DTYPES:
            raise ValueError(
                f"{source.path} has {name} in {source.dtype(name)}; expected weights in one of "
                f"{', '.join(str(dtype) for dtype in WEIGHT_DTYPES)}."
            )
    return parameters


def model_pieces(source: TensorSource) -> list[Piece]:
    """Every tensor of a source as it is."""
    return [_as_it_is(source, name) for name in source]


def served_pieces(
    source: TensorSource, flow: PrecisionFlow, *, tp_size: int = 1
) -> tuple[list[Piece], dict[str, Any], LinearPlan]:
    """A model as vLLM serves it in a flow.

    Args:
        source: Values, in any floating-point dtype; they are rounded to the flow's compute dtype.
        flow: A flow that serves block FP8.
        tp_size: Tensor-parallel size that the result must allow.

    Returns:
        The pieces, the content of `config.json`, and which linear layers are quantised.

    Raises:
        ValueError: The source is not of its config, the flow serves no block FP8, the model has no
            layer to quantise, or blocks cannot be cut at `tp_size`.
    """
    fmt = flow.rollout_weight
    parameters = checked_map(source)
    plan = linear_plan(parameters, flow)
    config = source.config | {"quantization_config": quantization_config(flow, plan)}
    assert isinstance(fmt, BlockFormat)  # quantization_config refuses others
    if problems := partition_violations(plan, train_tp=tp_size, rollout_tp=tp_size):
        raise ValueError(f"{source.path}: {problems[0]}.")
    codes, (rows, columns) = element_dtype(fmt.element), fmt.block_shape
    compute = torch_dtype(flow.compute_dtype)
    pieces = []
    for name, (height, *rest) in parameters.hf_shapes.items():
        if not is_quantised_weight(name, plan):
            pieces.append(_as_it_is(source, name, compute))
            continue
        (width,) = rest
        planned = (
            PlannedTensor(name=name, shape=(height, width), dtype=codes),
            PlannedTensor(
                name=scale_name(name),
                shape=(-(-height // rows), -(-width // columns)),
                dtype=torch.float32,
            ),
        )
        pieces.append(Piece(tensors=planned, make=partial(_encode, source, name, flow, plan)))
    return pieces, config_in_dtype(config, compute), plan


def _as_it_is(source: TensorSource, name: str, dtype: torch.dtype | None = None) -> Piece:
    dtype = dtype or source.dtype(name)
    planned = PlannedTensor(name=name, shape=source.shape(name), dtype=dtype)
    return Piece(tensors=(planned,), make=lambda: [(name, source[name].to(dtype))])


def _encode(
    source: TensorSource, name: str, flow: PrecisionFlow, plan: LinearPlan
) -> list[tuple[str, Tensor]]:
    tensor = source[name]
    if not tensor.isfinite().all():
        raise ValueError(
            f"{source.path} has {name} with values that are not finite; they cannot be quantised: "
            "take another checkpoint."
        )
    return list(encode(name, tensor.to(torch_dtype(flow.compute_dtype)), flow, plan))
