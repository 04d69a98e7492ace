"""The precision flow and what follows from it. Imports no torch until a dtype is asked for."""

from megatron_rl.precision.engines import megatron_precision, torch_dtype, vllm_precision
from megatron_rl.precision.flow import DType, PrecisionFlow, flow_names, resolve_flow

__all__ = [
    "DType",
    "PrecisionFlow",
    "flow_names",
    "megatron_precision",
    "resolve_flow",
    "torch_dtype",
    "vllm_precision",
]
