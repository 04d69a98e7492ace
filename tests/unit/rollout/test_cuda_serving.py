"""vLLM on CUDA as far as it can be seen without one: options, kernel names, bytes at loading."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.precision import LinearPlan, quantize_block, resolve_flow, vllm_precision
from megatron_rl.precision.kernels import REFUSED, SERVING_KERNEL
from megatron_rl.rollout import plugin

NO_PLAN = LinearPlan(quantised=(), exempt=())


def test_vllm_knows_the_options_and_the_kernels_by_these_names():
    from vllm.config import CompilationConfig
    from vllm.config.kernel import KernelConfig
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms import PlatformEnum

    options = vllm_precision(resolve_flow("fp8"), NO_PLAN, platform="cuda")
    assert KernelConfig(linear_backend=options["linear_backend"]).linear_backend == "deep_gemm"
    passes = CompilationConfig(**options["compilation_config"]).pass_config
    assert not (passes.fuse_norm_quant or passes.fuse_act_quant or passes.fuse_allreduce_rms)
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS
    on_cuda = {kernel.__name__ for kernel in kernels[PlatformEnum.CUDA]}
    on_cpu = {kernel.__name__ for kernel in kernels[PlatformEnum.CPU]}
    assert SERVING_KERNEL["cuda"] in on_cuda
    assert set(REFUSED) <= on_cuda | on_cpu


def test_only_quantised_rollout_gets_the_options_and_no_operator_is_shared():
    options = vllm_precision(resolve_flow("bf16"), NO_PLAN, platform="cuda")
    assert "linear_backend" not in options and "compilation_config" not in options
    assert options["additional_config"]["megatron_rl_shared_operators"] == []
    assert "linear_backend" not in vllm_precision(resolve_flow("fp8"), NO_PLAN)


@pytest.fixture
def fp8_utils(monkeypatch):
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    monkeypatch.setattr(
        fp8_utils, "requant_weight_ue8m0_inplace", fp8_utils.requant_weight_ue8m0_inplace
    )
    return fp8_utils


def requantised(fp8_utils, codes, scale_inv):
    codes, scale_inv = codes.clone(), scale_inv.clone()
    with torch.compiler.set_stance("force_eager"):
        fp8_utils.requant_weight_ue8m0_inplace(codes, scale_inv)
    return codes.view(torch.uint8), scale_inv


def test_weights_with_power_of_two_scales_stay_as_they_were_sent(fp8_utils):
    weight = torch.randn(256, 256).bfloat16()
    weight[:128, :128] *= 1e-6  # below vLLM's floor
    weight[128:, 128:].clamp_(-0.44, 0.44)  # largest code 224: it fits half the scale
    sent = quantize_block(weight)
    codes, scale_inv = requantised(fp8_utils, *sent)
    changed = scale_inv != sent[1]
    assert changed[0, 0] and changed[1, 1], "vLLM alone does requantise these"
    plugin.keep_power_of_two_scales()
    plugin.keep_power_of_two_scales()
    codes, scale_inv = requantised(fp8_utils, *sent)
    assert torch.equal(codes, sent[0].view(torch.uint8)) and torch.equal(scale_inv, sent[1])


def test_other_scales_are_left_to_vllm(fp8_utils):
    sent = quantize_block(torch.randn(256, 256).bfloat16(), scale_mode="fp32")
    expected = requantised(fp8_utils, *sent)
    plugin.keep_power_of_two_scales()
    for ours, theirs in zip(requantised(fp8_utils, *sent), expected, strict=True):
        assert torch.equal(ours, theirs)


def deep_gemm_layer(scale_inv, codes):
    kernel = type(SERVING_KERNEL["cuda"], (), {})()
    shape = SimpleNamespace(row=1, col=128)
    kernel.quant_fp8 = SimpleNamespace(group_shape=shape, use_ue8m0=True)
    return SimpleNamespace(
        quant_method=SimpleNamespace(fp8_linear=kernel),
        weight_block_size=[128, 128],
        weight=codes,
        weight_scale_inv=scale_inv,
    )


def test_the_report_reads_a_deep_gemm_layer():
    from megatron_rl.rollout.report import _block

    codes, scale_inv = quantize_block(torch.randn(256, 256).bfloat16())
    flow = resolve_flow("fp8")
    q, k = _block(deep_gemm_layer(scale_inv, codes), [128, 128], True)
    assert q.weight == flow.linear_weight.short_str() and q.digest != k.digest
    assert q.input == flow.linear_input.short_str()
    # Blackwell's packed exponents cannot be compared with the scales that were sent.
    packed = torch.zeros(256, 1, dtype=torch.int32)
    assert [part.digest for part in _block(deep_gemm_layer(packed, codes), [256], True)] == [None]
