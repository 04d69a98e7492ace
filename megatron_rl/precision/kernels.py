"""The kernels of rollout's quantised linear layers: the one that a platform is to use, and why.

vLLM chooses a kernel for every layer by itself. All of them take the codes and scales of a
block-FP8 checkpoint; they differ in how they quantise the input and in what they do to the weight
when it is loaded. Exactly one a platform multiplies the bytes that training used by inputs of the
flow's format. This module imports no torch.
"""

from typing import Any

from megatron_rl.precision.exactness import PlatformName
from megatron_rl.precision.formats import VLLM_POW2_AMAX_EPSILON, BlockFormat

SERVING_KERNEL: dict[PlatformName, str] = {
    "cpu": "ReferenceFp8BlockKernel",
    "cuda": "DeepGemmFp8BlockScaledMMKernel",
}
"""vLLM's name of the kernel, by platform."""
REFUSED = {
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": (
        "quantises inputs of fewer than 32 rows with FP32 scales and larger ones with powers of two"
    ),
    "CutlassFp8BlockScaledMMKernel": "quantises inputs with FP32 scales whatever the flow",
    "TritonFp8BlockScaledMMKernel": "quantises inputs with FP32 scales whatever the flow",
    "BlockWiseTorchFP8ScaledMMLinearKernel": "quantises inputs with FP32 scales whatever the flow",
    "MarlinFP8ScaledMMLinearKernel": "does not quantise inputs",
    "CPUFp8BlockScaledMMKernel": "does not quantise inputs",
}
"""What the other kernels would do to a unified flow."""
_VLLM_AMAX_FLOOR = 1e-10


def kernel_violation(kernel: str, platform: PlatformName) -> str | None:
    """Why rollout may not compute a quantised layer with a kernel; None where it may."""
    wanted = SERVING_KERNEL[platform]
    if kernel == wanted:
        return None
    what = REFUSED.get(kernel, "is not known here")
    return f"is computed by {kernel}, which {what}, and not by {wanted}"


def vllm_engine_options(platform: PlatformName) -> dict[str, Any]:
    """Engine arguments of vLLM that make it choose the serving kernel and leave its inputs alone.

    The passes that fuse the quantiser with the operator before it put another quantiser in its
    place, which has no power-of-two scales and a higher floor.
    """
    if platform != "cuda":
        return {}
    passes = ("fuse_norm_quant", "fuse_act_quant", "fuse_allreduce_rms")
    return {
        "linear_backend": "deep_gemm",
        "compilation_config": {"pass_config": dict.fromkeys(passes, False)},
    }


def deep_gemm_input_format(rows: int, columns: int, *, uses_e8m0: bool) -> BlockFormat:
    """The format in which vLLM's per-token-group quantiser hands inputs to DeepGEMM.

    Args:
        rows: Rows of a group.
        columns: Columns of a group.
        uses_e8m0: Whether its scales are rounded up to powers of two, which gives the codes of a
            multiplier rounded down to one. FP32 scales are divided by.
    """
    if uses_e8m0:
        return BlockFormat(
            block_rows=rows, block_columns=columns, amax_epsilon=VLLM_POW2_AMAX_EPSILON
        )
    return BlockFormat(
        block_rows=rows,
        block_columns=columns,
        scale_rounding="fp32",
        amax_epsilon=_VLLM_AMAX_FLOOR,
        formula="divide",
    )
