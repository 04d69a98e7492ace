"""Per-tensor and MXFP8 quantisation against the literal rules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.precision import (
    dequantize_mxfp8,
    dequantize_tensor,
    quantize_mxfp8,
    quantize_tensor,
)
from support.literal_fp8 import (
    E4M3,
    E5M2,
    MAX,
    assert_same_bytes,
    literal_mx_quantise,
    literal_quantise,
    matrices,
)

DTYPES = st.sampled_from([E4M3, E5M2])
few = settings(max_examples=60, deadline=None)


@few
@given(matrices(dtypes=(torch.bfloat16, torch.float32)), DTYPES, st.sampled_from(["pow2", "fp32"]))
def test_a_tensor_is_one_block(x, dtype, mode):
    codes, scale_inv = quantize_tensor(x, mode, dtype)
    # Where the source is bfloat16 its largest finite number is not the one that the rule names.
    want_codes, want_scale_inv = literal_quantise(x.float(), tuple(x.shape), mode, dtype, 0.0)
    assert_same_bytes(codes, want_codes)
    assert_same_bytes(scale_inv, want_scale_inv.view(1))
    values = dequantize_tensor(codes, scale_inv, torch.float32)
    expected = codes.float() * scale_inv
    assert_same_bytes(values.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_the_shape_of_a_tensor_does_not_matter():
    x = torch.randn(3, 5, 8)
    codes, scale_inv = quantize_tensor(x)
    assert codes.shape == x.shape and scale_inv.shape == (1,)
    assert_same_bytes(codes.flatten(), quantize_tensor(x.flatten())[0])
    assert dequantize_tensor(codes, scale_inv).shape == x.shape
    empty, one = quantize_tensor(torch.zeros(0, 4))
    assert one.tolist() == [1.0] and dequantize_tensor(empty, one).shape == (0, 4)
    with pytest.raises(ValueError, match="a tensor has one scale"):
        dequantize_tensor(codes, torch.ones(2))


@settings(max_examples=100, deadline=None)
@given(matrices(), DTYPES, st.integers(1, 8))
def test_mx_codes_and_scales_are_those_of_the_literal_rule(x, dtype, repeats):
    x = x.repeat(1, repeats)  # blocks of 32: whole, partial, several
    codes, scale = quantize_mxfp8(x, dtype=dtype)
    want_codes, want_exponents = literal_mx_quantise(x, dtype)
    assert scale.dtype == torch.float8_e8m0fnu
    assert_same_bytes(scale.view(torch.uint8), want_exponents)
    assert_same_bytes(codes, want_codes)
    turned, turned_scale = quantize_mxfp8(x.t(), (32, 1), dtype)
    assert_same_bytes(turned.t(), codes)
    assert_same_bytes(turned_scale.view(torch.uint8).t(), want_exponents)


@few
@given(matrices(any_bits=False), DTYPES)
def test_mx_values_are_within_half_a_step(x, dtype):
    codes, scale = quantize_mxfp8(x, dtype=dtype)
    assert codes.float().abs().max() <= MAX[dtype]
    values = dequantize_mxfp8(codes, scale, dtype=torch.float32).double()
    half, tiniest = (2.0**-4, 2.0**-10) if dtype == E4M3 else (2.0**-3, 2.0**-17)
    bound = torch.maximum(x.double().abs() * half, scale.float().double() * tiniest)
    assert bool(((values - x.double()).abs() <= bound).all())


@pytest.mark.parametrize(
    ("block", "exponent", "codes"),
    [
        ([0.0, -0.0], 0, [0x00, 0x80]),
        ([448.0, 1.0], 127, [0x7E, 0x38]),
        ([450.0, 1.0], 128, [0x76, 0x30]),
        ([float("inf"), -1.0], 254, [0x7E, 0x80]),
        ([float("nan"), 448.0], 127, [0x7F, 0x7E]),
        ([448 * 2.0**-127, 0.0], 0, [0x00, 0x00]),  # stored unscaled, so lost
        ([448 * 2.0**-126, 0.0], 1, [0x7E, 0x00]),
    ],
)
def test_mx_edges(block, exponent, codes):
    got, scale = quantize_mxfp8(torch.tensor([block], dtype=torch.bfloat16))
    assert scale.view(torch.uint8).tolist() == [[exponent]]
    assert got.view(torch.uint8).tolist() == [codes]


def test_mx_blocks_have_one_size():
    with pytest.raises(ValueError, match="is no MX block"):
        quantize_mxfp8(torch.zeros(4, 64), (1, 16))
