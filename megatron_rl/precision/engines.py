"""What a precision flow means to the two engines: dtypes for Megatron, arguments for vLLM.

Both translations take the flow and nothing else, so the two sides cannot be set apart by accident.
"""

from typing import Any

from megatron_rl.precision.flow import DType, PrecisionFlow


def torch_dtype(dtype: DType) -> Any:
    """The ``torch.dtype`` of a role's format."""
    import torch

    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[dtype]


def megatron_precision(flow: PrecisionFlow) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` and ``OptimizerConfig`` that the flow decides."""
    return {
        "params_dtype": torch_dtype(flow.compute_dtype),
        "bf16": flow.compute_dtype == "bfloat16",
        "fp16": flow.compute_dtype == "float16",
    }


def vllm_precision(flow: PrecisionFlow) -> dict[str, Any]:
    """Engine arguments of vLLM that the flow decides."""
    return {
        "dtype": flow.compute_dtype,
        "kv_cache_dtype": "auto",  # the engine's dtype, which is the flow's
        "logprobs_mode": "processed_logprobs",  # of the sampled distribution: after the temperature
        "additional_config": {"megatron_rl_shared_operators": list(flow.shared_operators)},
    }
