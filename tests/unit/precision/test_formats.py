"""Formats of operands, as values."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from megatron_rl.precision import BlockFormat, MXFormat, TensorFormat, quantize_block
from megatron_rl.precision.formats import E4M3_MAX, FP8_MAX, VLLM_POW2_AMAX_EPSILON


def test_the_maxima_are_the_dtypes_own():
    for element, dtype in {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.items():
        assert FP8_MAX[element] == torch.finfo(dtype).max


@pytest.mark.parametrize(
    ("operand", "text"),
    [
        (BlockFormat(), "e4m3 128x128 pow2"),
        (BlockFormat(block_rows=1), "e4m3 1x128 pow2"),
        (BlockFormat(block_rows=1, element="e5m2", scale_rounding="fp32"), "e5m2 1x128 fp32"),
        (
            BlockFormat(formula="divide", scale_dtype="e8m0", source_dtype="float16"),
            "e4m3 128x128 pow2 e8m0 scale divided from float16",
        ),
        (
            BlockFormat(block_rows=1, amax_epsilon=VLLM_POW2_AMAX_EPSILON),
            "e4m3 1x128 pow2 amax>=5.22e-08",
        ),
        (TensorFormat(), "e4m3 tensor fp32"),
        (
            TensorFormat(amax_epsilon=1e-3, source_dtype="float32"),
            "e4m3 tensor fp32 amax>=0.001 from float32",
        ),
        (MXFormat(), "mx-e4m3 1x32 e8m0"),
        (MXFormat(element="e5m2", source_dtype="float32"), "mx-e5m2 1x32 e8m0 from float32"),
    ],
)
def test_a_format_says_what_it_is(operand, text):
    assert operand.short_str() == text
    assert operand == replace(operand) and operand != replace(operand, source_dtype="?")
    with pytest.raises(FrozenInstanceError):
        operand.element = "e5m2"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_rows": 0}, "holds nothing"),
        ({"scale_dtype": "e8m0", "scale_rounding": "fp32"}, "set scale_rounding='pow2'"),
        ({"amax_epsilon": -1.0}, "is no floor"),
        ({"amax_epsilon": float("nan")}, "is no floor"),
    ],
)
def test_a_format_that_nothing_can_hold_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BlockFormat(**fields)


def test_the_floor_is_the_largest_amax_whose_scale_is_vllms_smallest():
    amax = torch.tensor([[VLLM_POW2_AMAX_EPSILON]])
    assert amax.item() == VLLM_POW2_AMAX_EPSILON == E4M3_MAX * 2.0**-33  # exact in FP32
    assert quantize_block(amax, (1, 128))[1].item() == 2.0**-33
    above = torch.nextafter(amax, torch.tensor(1.0))
    assert quantize_block(above, (1, 128))[1].item() == 2.0**-32
