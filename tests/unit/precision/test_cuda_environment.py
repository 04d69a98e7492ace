"""Variables of a process on CUDA follow from the flow, and the audit asks for them."""

import pytest

from megatron_rl.precision import audit, resolve_flow
from megatron_rl.precision.audit import ModelReport, Operand
from megatron_rl.precision.environment import environment_violations, flow_environment
from megatron_rl.precision.kernels import SERVING_KERNEL, deep_gemm_input_format
from megatron_rl.precision.partition import LinearPlan, LinearShape
from megatron_rl.precision.te import device_violation

FP32_SCALES = {
    "base": "fp8",
    "linear_weight": "e4m3 128x128 fp32",
    "linear_input": "e4m3 1x128 fp32",
    "output_gradient": "e4m3 1x128 fp32",
}
NVTE, E8M0 = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "VLLM_USE_DEEP_GEMM_E8M0"
MODULE = "model.layers.0.mlp.down_proj"


def test_both_sides_get_one_rounding_of_scales():
    pow2, fp32 = (flow_environment(resolve_flow(choice)) for choice in ("fp8", FP32_SCALES))
    assert (pow2[NVTE], pow2[E8M0]) == ("0", "1")
    assert (fp32[NVTE], fp32[E8M0]) == ("1", "0")
    assert pow2["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] == "0"


def test_only_the_side_that_quantises_gets_variables():
    assert flow_environment(resolve_flow("bf16")) == {}
    assert NVTE not in flow_environment(resolve_flow("fp8_rollout"))


def test_another_environment_is_a_violation_each():
    flow = resolve_flow("fp8")
    right = flow_environment(flow)
    assert environment_violations(flow, right | {"HOME": "/"}) == []
    assert len(environment_violations(flow, {})) == len(right)
    (found,) = environment_violations(flow, right | {E8M0: "0"})
    assert E8M0 in found and "'1'" in found
    (found,) = environment_violations(flow, right | {"NVTE_BACKWARD_OVERRIDE": "dequantized"})
    assert "unset it" in found


class Side:
    """One linear layer as it should be on CUDA, but for what a test changes."""

    flow = resolve_flow("fp8")
    plan = LinearPlan(
        quantised=(
            LinearShape(
                name="decoder.layers.0.mlp.linear_fc2",
                hf_modules=(MODULE,),
                part_rows=(128,),
                columns=128,
                row_unit=128,
                tp_axis=1,
                layer=0,
            ),
        ),
        exempt=(),
    )

    def __init__(self, kernel=SERVING_KERNEL["cuda"], uses_e8m0=True):
        inputs = deep_gemm_input_format(1, 128, uses_e8m0=uses_e8m0).short_str()
        self.operand = Operand(
            weight="e4m3 128x128 pow2", input=inputs, kernel=kernel, digest="same"
        )

    def report(self):
        return ModelReport(linears={MODULE: self.operand}, shared_operators=())


@pytest.fixture
def right_environment(monkeypatch):
    for name, value in flow_environment(Side.flow).items():
        monkeypatch.setenv(name, value)


def test_a_clean_model_on_cuda_has_no_violation(right_environment):
    assert audit(Side("TransformerEngineRowParallelLinear"), Side(), platform="cuda") == []


@pytest.mark.parametrize(
    "kernel, what",
    [
        ("MarlinFP8ScaledMMLinearKernel", "does not quantise inputs"),
        ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "fewer than 32 rows"),
        ("SomeNewKernel", "not known here"),
    ],
)
def test_another_kernel_is_refused_and_named(right_environment, kernel, what):
    (found,) = audit(Side(), Side(kernel), platform="cuda")
    assert MODULE in found and kernel in found and what in found


def test_inputs_with_fp32_scales_are_caught(right_environment):
    (found,) = audit(Side(), Side(uses_e8m0=False), platform="cuda")
    assert "fp32 amax>=1e-10 divided" in found and "asks for e4m3 1x128 pow2" in found


def test_a_process_without_the_environment_is_caught(monkeypatch):
    monkeypatch.delenv(NVTE, raising=False)
    assert any(NVTE in text for text in audit(Side(), Side(), platform="cuda"))


@pytest.mark.parametrize(
    "choice, capability, what",
    [
        ("fp8", (9, 0), None),
        ("fp8", (10, 3), None),
        (FP32_SCALES, (9, 0), None),
        (FP32_SCALES, (10, 0), "powers of two only"),
        ("fp8", (8, 9), "this one has 8.9"),
        ("fp8", (12, 0), "this one has 12.0"),
    ],
)
def test_devices_that_compute_a_flow(choice, capability, what):
    violation = device_violation(resolve_flow(choice), capability)
    assert violation is None if what is None else what in violation
