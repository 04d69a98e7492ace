"""How a policy travels: the names, tensors and metadata of a block-FP8 checkpoint.

The format is the field's own (DeepSeek-V3's, read by vLLM and transformers): each quantised weight
``name.weight`` is FP8 codes, beside FP32 ``name.weight_scale_inv`` of one number a block, and the
configuration's ``quantization_config`` lists the layers that are not quantised. Weight sync and the
checkpoint tools both write it, and neither quantises what is quantised already.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from megatron_rl.precision.flow import PrecisionFlow
from megatron_rl.precision.formats import BlockFormat
from megatron_rl.precision.partition import LinearPlan

if TYPE_CHECKING:
    import torch

SCALE_SUFFIX = "_scale_inv"


def scale_name(weight_name: str) -> str:
    """Name of the scales that belong to a weight."""
    return weight_name + SCALE_SUFFIX


def is_quantised_weight(name: str, plan: LinearPlan) -> bool:
    """Whether a Hugging Face tensor is a weight that the plan quantises."""
    return name.endswith(".weight") and plan.is_quantised(name.removesuffix(".weight"))


def served_names(hf_names: Iterable[str], plan: LinearPlan) -> list[str]:
    """Names of a served checkpoint: those of the model, and the scales of quantised weights."""
    return [
        served
        for name in hf_names
        for served in ([name, scale_name(name)] if is_quantised_weight(name, plan) else [name])
    ]


def quantization_config(flow: PrecisionFlow, plan: LinearPlan) -> dict[str, Any]:
    """The ``quantization_config`` of a served checkpoint.

    Raises:
        ValueError: The flow serves no block-FP8 weights.
    """
    fmt = _weight_format(flow)
    return {
        "quant_method": "fp8",
        "fmt": fmt.element,
        "activation_scheme": "dynamic",
        "weight_block_size": list(fmt.block_shape),
        "modules_to_not_convert": ["lm_head", *plan.exempt_hf_modules],
    }


def encode(
    name: str, tensor: "torch.Tensor", flow: PrecisionFlow, plan: LinearPlan
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """One Hugging Face tensor as it is served: quantised by the flow, or as it is.

    Args:
        name: Hugging Face name.
        tensor: In the flow's compute dtype; codes are made from this rounding, on every path.
        flow: The flow.
        plan: Which linears are quantised.

    Yields:
        The tensor, or its codes and its scales.
    """
    if not is_quantised_weight(name, plan):
        yield name, tensor
        return
    from megatron_rl.precision.products import quantize_operand

    codes, scale_inv = quantize_operand(tensor, _weight_format(flow))
    yield name, codes
    yield scale_name(name), scale_inv


def _weight_format(flow: PrecisionFlow) -> BlockFormat:
    fmt = flow.rollout_weight
    if not isinstance(fmt, BlockFormat):
        raise ValueError(
            f"flow {flow.name!r} serves {fmt if isinstance(fmt, str) else fmt.short_str()} "
            "weights, and a block-FP8 checkpoint was asked for; use a flow such as fp8"
        )
    return fmt
