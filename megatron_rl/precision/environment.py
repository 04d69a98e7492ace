"""Environment variables that a flow needs on CUDA, and the check that they were in force.

Transformer Engine, vLLM and DeepGEMM choose quantisers by variables that they read once, at import
or at first use, and whose defaults are not what a unified flow needs. Whoever starts a process
exports these before it imports any of them; the audit asks again.

| variable | pow2 scales | fp32 scales | what it decides |
|---|---|---|---|
| NVTE_FP8_BLOCK_SCALING_FP32_SCALES | 0 | 1 | rounding of TE's scales, in all three operands |
| VLLM_USE_DEEP_GEMM | 1 | 1 | DeepGEMM computes block-scaled products |
| VLLM_USE_DEEP_GEMM_E8M0 | 1 | 0 | its activation scales are powers of two |
| VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER | 0 | 0 | no second quantiser below 32 rows |

No torch here.
"""

from collections.abc import Mapping

from megatron_rl.precision.flow import PrecisionFlow
from megatron_rl.precision.formats import BlockFormat

UNSET = "NVTE_BACKWARD_OVERRIDE"
"""Would give the backward pass of Transformer Engine other operands than the flow names."""


def flow_environment(flow: PrecisionFlow) -> dict[str, str]:
    """Variables of every process of a run on CUDA; empty for a flow that quantises nothing."""
    variables = {}
    if flow.trains_quantised:
        fp32 = _scale_rounding(flow.linear_weight) == "fp32"
        variables["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1" if fp32 else "0"
    if flow.serves_quantised:
        pow2 = _scale_rounding(flow.rollout_input) == "pow2"
        variables["VLLM_USE_DEEP_GEMM"] = "1"
        # Unset, a checkpoint's own configuration would choose it.
        variables["VLLM_USE_DEEP_GEMM_E8M0"] = "1" if pow2 else "0"
        variables["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] = "0"
    return variables


def environment_violations(flow: PrecisionFlow, environ: Mapping[str, str]) -> list[str]:
    """Where a process on CUDA has other variables than the flow needs: a sentence each."""
    needed = flow_environment(flow)
    found = [
        f"{name}={environ.get(name)!r} in this process, and flow {flow.name!r} needs {value!r}; "
        "start the run with the megatron-rl command, which exports it before the imports"
        for name, value in needed.items()
        if environ.get(name) != value
    ]
    if flow.trains_quantised and UNSET in environ:
        found.append(
            f"{UNSET}={environ[UNSET]!r} changes the backward products of flow {flow.name!r}; "
            "unset it"
        )
    return found


def _scale_rounding(fmt: object) -> str | None:
    return fmt.scale_rounding if isinstance(fmt, BlockFormat) else None
