"""The shortcuts of the quantiser equal the plain conversions they replace, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.precision import dequantize_block, quantize_block, quantize_dequantize
from megatron_rl.precision.rounding import decode, round_bfloat16
from support.literal_fp8 import BLOCKS, E4M3, E5M2, assert_same_bytes, matrices

DTYPES = st.sampled_from([E4M3, E5M2])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_decodes_to_its_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    decoded, converted = decode(codes), codes.to(torch.float32)
    assert torch.equal(decoded.isnan(), converted.isnan())
    assert_same_bytes(decoded.nan_to_num(7.0), converted.nan_to_num(7.0))


def plainly(x, blocks, mode, dtype, epsilon, out_dtype):
    codes, scale_inv = quantize_block(x, blocks, mode, dtype, epsilon)
    return dequantize_block(codes, scale_inv, blocks, out_dtype)


@settings(max_examples=150, deadline=None)
@given(
    matrices(),
    BLOCKS,
    st.sampled_from(["pow2", "fp32"]),
    DTYPES,
    st.sampled_from([0.0, 448 * 2.0**-33, 1e-3, 1e30]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_both_steps_in_one_are_both_steps(x, blocks, mode, dtype, epsilon, out_dtype):
    fused = quantize_dequantize(x, blocks, mode, dtype, epsilon, out_dtype=out_dtype)
    assert fused.dtype == out_dtype
    assert_same_bytes(fused, plainly(x, blocks, mode, dtype, epsilon, out_dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("exponent", [-85, 0, 80])
def test_every_bfloat16_rounds_alike(dtype, exponent):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() <= 448]
    rows = every[: every.numel() // 63 * 63].view(-1, 63)
    # Each row with its maximum: one block, in which everything else is normal, subnormal or zero.
    x = torch.nn.functional.pad(rows, (0, 1), value=448.0) * 2.0**exponent
    for matrix, blocks in [(x, (1, 64)), (x.t(), (64, 1)), (x, (128, 128))]:
        rounded = round_bfloat16(matrix, blocks, dtype, 0.0)
        assert_same_bytes(rounded, plainly(matrix, blocks, "pow2", dtype, 0.0, torch.bfloat16))


def test_the_shortcut_is_taken_for_what_a_layer_holds_and_not_for_what_it_cannot():
    x = torch.randn(6, 200, dtype=torch.float32).bfloat16()
    x[2] = 0
    assert round_bfloat16(x, (1, 128), E4M3, 0.0) is not None
    for unfit in (float("nan"), float("inf"), 2.0**120, 2.0**-130):
        spoiled = x.clone()
        spoiled[2, 7] = unfit
        assert round_bfloat16(spoiled, (1, 128), E4M3, 0.0) is None


def test_strided_input_and_leading_dimensions():
    x = torch.randn(2, 300, 70).bfloat16()
    turned = x[0].t()
    assert_same_bytes(
        quantize_dequantize(turned, (1, 128)), quantize_dequantize(turned.contiguous(), (1, 128))
    )
    fused = quantize_dequantize(x, (1, 128))
    assert fused.shape == x.shape
    assert_same_bytes(fused[1], quantize_dequantize(x[1], (1, 128)))
