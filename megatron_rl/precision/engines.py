"""What a precision flow means to the two engines: dtypes for Megatron, arguments for vLLM.

Both translations take the flow and what it makes of the model's linear layers, and nothing else, so
the two sides cannot be set apart by accident.
"""

from dataclasses import asdict
from typing import Any

from megatron_rl.precision.exactness import PlatformName
from megatron_rl.precision.flow import DType, PrecisionFlow
from megatron_rl.precision.formats import BlockFormat, Element
from megatron_rl.precision.kernels import vllm_engine_options
from megatron_rl.precision.partition import LinearPlan
from megatron_rl.precision.wire import quantization_config

SHARED_OPERATORS = "megatron_rl_shared_operators"
"""Key of vLLM's ``additional_config``: the operators shared with the trainer."""
LINEAR_INPUT = "megatron_rl_linear_input"
"""Key of vLLM's ``additional_config``: fields of the block format of linear inputs."""


def torch_dtype(dtype: DType) -> Any:
    """The ``torch.dtype`` of a role's format."""
    import torch

    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[dtype]


def element_dtype(element: Element) -> Any:
    """The ``torch.dtype`` of an eight-bit element."""
    import torch

    return {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]


def megatron_precision(flow: PrecisionFlow) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` and ``OptimizerConfig`` that the flow decides."""
    return {
        "params_dtype": torch_dtype(flow.compute_dtype),
        "bf16": flow.compute_dtype == "bfloat16",
        "fp16": flow.compute_dtype == "float16",
    }


def megatron_loss_scale(flow: PrecisionFlow) -> dict[str, Any]:
    """Fields of Megatron's ``OptimizerConfig`` for the flow's loss scale; none without one.

    It has no field for the backoff factor, nor for when to give up.
    """
    if flow.loss_scale is None:
        return {}
    return {
        "initial_loss_scale": flow.loss_scale.initial,
        "min_loss_scale": flow.loss_scale.floor,
        "loss_scale_window": flow.loss_scale.growth_interval_steps,
        "hysteresis": flow.loss_scale.hysteresis,
    }


def vllm_precision(
    flow: PrecisionFlow, plan: LinearPlan, *, platform: PlatformName = "cpu"
) -> dict[str, Any]:
    """Engine arguments of vLLM that the flow decides.

    Args:
        flow: The flow.
        plan: Which linear layers of the model it quantises.
        platform: Where rollout computes. Operators are shared on a CPU only.
    """
    shared = list(flow.shared_operators) if platform == "cpu" else []
    additional: dict[str, Any] = {SHARED_OPERATORS: shared}
    overrides: dict[str, Any] = {}
    arguments: dict[str, Any] = {
        "dtype": flow.compute_dtype,
        "kv_cache_dtype": "auto",  # the engine's dtype, which is the flow's
        "logprobs_mode": "processed_logprobs",  # of the sampled distribution: after the temperature
    }
    if flow.serves_quantised:
        assert isinstance(flow.rollout_input, BlockFormat)
        additional[LINEAR_INPUT] = asdict(flow.rollout_input)
        overrides["quantization_config"] = quantization_config(flow, plan)
        # The checkpoint is not quantised; the first weight sync brings codes and scales.
        arguments["load_format"] = "dummy"
        arguments |= vllm_engine_options(platform)
    if flow.lm_head != flow.compute_dtype:
        overrides["head_dtype"] = flow.lm_head
    if overrides:
        arguments["hf_overrides"] = overrides
    return arguments | {"additional_config": additional}
