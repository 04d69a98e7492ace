"""The reference quantiser against those of vLLM and torchao.

Neither is the definition: each states another rule, and the tests say where the two differ.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.precision import dequantize_block, quantize_block
from megatron_rl.precision.formats import VLLM_POW2_AMAX_EPSILON
from support.literal_fp8 import assert_same_bytes

pytestmark = pytest.mark.slow

ABOVE_EVERY_FLOOR = 2.0**-8  # of vLLM: 1e-4 for weights, 448 / (448 * 512) for activations


def heavy_tailed(m, k, seed=0):
    """bfloat16 with every block's maximum above vLLM's floors."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
    x[:, ::128] = ABOVE_EVERY_FLOOR * 2
    return x.bfloat16()


def every_amax():
    """One row of each positive bfloat16 as the maximum of its block, above the floors."""
    every = torch.arange(0x8000).to(torch.int16).view(torch.bfloat16)
    every = every[(every >= ABOVE_EVERY_FLOOR) & (every <= 2.0**100)]
    return every[:, None] * torch.tensor([1.0, -0.5, 0.37, 0.001]).bfloat16()


def test_weights_agree_with_vllm():
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    w = heavy_tailed(300, 520)
    codes, scale_inv = quantize_block(w, (128, 128), "pow2")
    theirs, their_scale_inv = per_block_cast_to_fp8(w, [128, 128], use_ue8m0=True)
    assert_same_bytes(codes, theirs)
    assert_same_bytes(scale_inv, their_scale_inv)
    # Without rounding of scales vLLM divides where TE multiplies: an ulp of the scale.
    _, scale_inv = quantize_block(w, (128, 128), "fp32")
    _, their_scale_inv = per_block_cast_to_fp8(w, [128, 128])
    assert (scale_inv / their_scale_inv - 1).abs().max() <= 2.0**-23
    # A block whose largest code is 224 is stored by vLLM with half the scale: the values are kept.
    w = torch.tensor([[452.0, 3.0]]).bfloat16()
    values = dequantize_block(*quantize_block(w))
    again, again_scale_inv = per_block_cast_to_fp8(values, [128, 128], use_ue8m0=True)
    assert again_scale_inv.item() == 1.0 and quantize_block(w)[1].item() == 2.0
    assert torch.equal(dequantize_block(again, again_scale_inv), values)


@pytest.mark.parametrize("make", [every_amax, lambda: heavy_tailed(500, 576)])
def test_inputs_agree_with_vllm(make):
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    x = make()
    settings = SimpleNamespace(group_size=128, use_ue8m0=True, column_major_scales=False)
    theirs, their_scale_inv = QuantFP8._quantize_group_native(settings, x)
    codes, scale_inv = quantize_block(x, (1, 128), amax_epsilon=VLLM_POW2_AMAX_EPSILON)
    assert_same_bytes(scale_inv, their_scale_inv)
    assert_same_bytes(codes, theirs)


def test_unrounded_scales_agree_with_torchao():
    kernels = pytest.importorskip(
        "torchao.prototype.blockwise_fp8_training.kernels",
        reason="torchao and triton are not among the requirements; put them on PYTHONPATH",
    )
    for seed in range(5):
        x = heavy_tailed(256, 512, seed)
        for blocks, theirs in [
            ((1, 128), kernels.torch_blockwise_scale_act_quant_lhs(x)),
            ((128, 128), kernels.torch_blockwise_scale_weight_quant(x)),
        ]:
            codes, scale_inv = quantize_block(x, blocks, "fp32")
            assert_same_bytes(codes, theirs[0])
            assert_same_bytes(scale_inv, theirs[1])
