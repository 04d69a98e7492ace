"""The precision flow, what follows from it, and the reference quantiser that defines its formats.

Importing this package imports no torch: the quantiser's functions are loaded when first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_rl.precision.audit import audit
from megatron_rl.precision.engines import (
    megatron_loss_scale,
    megatron_precision,
    torch_dtype,
    vllm_precision,
)
from megatron_rl.precision.flow import DType, Format, LossScale, PrecisionFlow, format_str
from megatron_rl.precision.flows import flow_names, flow_of, resolve_flow
from megatron_rl.precision.formats import BlockFormat, MXFormat, OperandFormat, TensorFormat
from megatron_rl.precision.partition import (
    LinearPlan,
    LinearShape,
    partition_violations,
    plan_linears,
)

if TYPE_CHECKING:
    from megatron_rl.precision.mxfp8 import dequantize_mxfp8, quantize_mxfp8
    from megatron_rl.precision.quantize import (
        dequantize_block,
        quantize_block,
        quantize_dequantize,
    )
    from megatron_rl.precision.tensorwise import dequantize_tensor, quantize_tensor

__all__ = [
    "BlockFormat",
    "DType",
    "Format",
    "LinearPlan",
    "LinearShape",
    "LossScale",
    "MXFormat",
    "OperandFormat",
    "PrecisionFlow",
    "TensorFormat",
    "audit",
    "dequantize_block",
    "dequantize_mxfp8",
    "dequantize_tensor",
    "flow_names",
    "flow_of",
    "format_str",
    "megatron_loss_scale",
    "megatron_precision",
    "partition_violations",
    "plan_linears",
    "quantize_block",
    "quantize_dequantize",
    "quantize_mxfp8",
    "quantize_tensor",
    "resolve_flow",
    "torch_dtype",
    "vllm_precision",
]

_QUANTISER = {
    "dequantize_block": "quantize",
    "quantize_block": "quantize",
    "quantize_dequantize": "quantize",
    "dequantize_mxfp8": "mxfp8",
    "quantize_mxfp8": "mxfp8",
    "dequantize_tensor": "tensorwise",
    "quantize_tensor": "tensorwise",
}


def __getattr__(name: str) -> Any:
    """Loads the quantiser, and torch with it, at the first use of one of its names."""
    if name in _QUANTISER:
        return getattr(import_module(f"{__name__}.{_QUANTISER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
