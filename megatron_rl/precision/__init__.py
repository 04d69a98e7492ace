"""The precision flow and what follows from it. Imports no torch until a dtype is asked for."""

from typing import TYPE_CHECKING, Any

from megatron_rl.precision.audit import audit
from megatron_rl.precision.engines import megatron_precision, torch_dtype, vllm_precision
from megatron_rl.precision.flow import DType, Format, LossScale, PrecisionFlow, format_str
from megatron_rl.precision.flows import flow_names, flow_of, resolve_flow
from megatron_rl.precision.formats import BlockFormat, MXFormat, TensorFormat
from megatron_rl.precision.partition import (
    LinearPlan,
    LinearShape,
    partition_violations,
    plan_linears,
)

if TYPE_CHECKING:
    from megatron_rl.precision.quantize import dequantize_block, quantize_block

__all__ = [
    "BlockFormat",
    "DType",
    "Format",
    "LinearPlan",
    "LinearShape",
    "LossScale",
    "MXFormat",
    "PrecisionFlow",
    "TensorFormat",
    "audit",
    "dequantize_block",
    "flow_names",
    "flow_of",
    "format_str",
    "megatron_precision",
    "partition_violations",
    "plan_linears",
    "quantize_block",
    "resolve_flow",
    "torch_dtype",
    "vllm_precision",
]


def __getattr__(name: str) -> Any:
    """Loads what needs torch when it is first asked for."""
    if name in ("dequantize_block", "quantize_block"):
        from megatron_rl.precision import quantize

        return getattr(quantize, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
