"""Block-scaled FP8: the reference quantiser against a literal one, and its invariances."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.precision import dequantize_block, quantize_block
from support.literal_fp8 import (
    BLOCKS,
    E4M3,
    E5M2,
    MAX,
    assert_same_bytes,
    literal_quantise,
    matrices,
)

MODES = st.sampled_from(["pow2", "fp32"])
DTYPES = st.sampled_from([E4M3, E5M2])
FINITE = matrices(any_bits=False)
STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # half the distance of neighbours, relative to the smaller
TINIEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}

few = settings(max_examples=60, deadline=None)


def assert_same_quantised(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert_same_bytes(mine, theirs)


def seeded(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(matrices(), BLOCKS, MODES, DTYPES, st.sampled_from([0.0, 1e-3]))
def test_codes_and_scales_are_those_of_the_literal_rule(x, blocks, mode, dtype, epsilon):
    codes, scale_inv = quantize_block(x, blocks, mode, dtype, epsilon)
    want_codes, want_scale_inv = literal_quantise(x, blocks, mode, dtype, epsilon)
    assert codes.dtype == dtype
    assert_same_bytes(scale_inv, want_scale_inv)
    assert_same_bytes(codes, want_codes)


@pytest.mark.parametrize("mode", ["pow2", "fp32"])
def test_real_block_shapes_are_those_of_the_literal_rule(mode):
    x = (seeded(130, 131) * torch.exp(2 * seeded(130, 1, seed=1))).bfloat16()
    for blocks in [(128, 128), (1, 128), (128, 1)]:
        got = quantize_block(x, blocks, mode)
        assert_same_quantised(got, literal_quantise(x, blocks, mode, E4M3, 0.0))


@few
@given(FINITE, BLOCKS, MODES, DTYPES)
def test_values_are_within_half_a_step(x, blocks, mode, dtype):
    codes, scale_inv = quantize_block(x, blocks, mode, dtype)
    assert codes.float().abs().max() <= MAX[dtype]  # false for NaN, so all are finite
    assert bool((scale_inv > 0).all() and scale_inv.isfinite().all())
    values = dequantize_block(codes, scale_inv, blocks, torch.float32).double()
    ones = torch.ones_like(codes, dtype=torch.float32).to(dtype)
    step = dequantize_block(ones, scale_inv, blocks, torch.float32).double() * TINIEST[dtype]
    # Two FP32 roundings, of the scale and of the product, come on top with fp32 scales.
    bound = torch.maximum(x.double().abs() * (STEP[dtype] + 2.0**-22), step / 2 * (1 + 2.0**-22))
    assert bool(((values - x.double()).abs() <= bound).all())


@few
@given(FINITE, BLOCKS, DTYPES)
def test_quantising_the_values_gives_the_values(x, blocks, dtype):
    codes, scale_inv = quantize_block(x, blocks, "pow2", dtype)
    values = dequantize_block(codes, scale_inv, blocks, torch.float32)
    again, scale_inv_again = quantize_block(values, blocks, "pow2", dtype)
    assert_same_bytes(dequantize_block(again, scale_inv_again, blocks, torch.float32), values)
    # A block whose largest code is half of the limit fits a scale half as large.
    assert set((scale_inv_again / scale_inv).unique().tolist()) <= {0.5, 1.0}
    if torch.equal(scale_inv_again, scale_inv):
        assert_same_bytes(again, codes)


@few
@given(st.integers(0, 99), st.integers(-40, 40), BLOCKS, MODES)
def test_a_power_of_two_moves_the_scales_and_not_the_codes(seed, exponent, blocks, mode):
    x = seeded(6, 9, seed=seed)
    codes, scale_inv = quantize_block(x, blocks, mode)
    moved, moved_scale_inv = quantize_block(x * 2.0**exponent, blocks, mode)
    assert_same_bytes(moved, codes)
    assert_same_bytes(moved_scale_inv, scale_inv * 2.0**exponent)


@few
@given(matrices(), BLOCKS, MODES, DTYPES)
def test_the_transpose_quantises_to_the_transpose(x, blocks, mode, dtype):
    codes, scale_inv = quantize_block(x, blocks, mode, dtype)
    turned, turned_scale_inv = quantize_block(x.t(), blocks[::-1], mode, dtype)
    assert_same_bytes(turned.t(), codes)
    assert_same_bytes(turned_scale_inv.t(), scale_inv)


@few
@given(matrices(), BLOCKS, MODES, DTYPES)
def test_a_partial_block_is_a_block_padded_with_zeros(x, blocks, mode, dtype):
    (m, k), (bm, bk) = x.shape, blocks
    padded = torch.nn.functional.pad(x, (0, -k % bk, 0, -m % bm))
    codes, scale_inv = quantize_block(padded, blocks, mode, dtype)
    assert_same_quantised(quantize_block(x, blocks, mode, dtype), (codes[:m, :k], scale_inv))


def test_blocks_do_not_see_each_other_and_chunks_do_not_show():
    x = seeded(300, 1100).bfloat16()  # more than one chunk, and partial blocks on both sides
    for bm, bk in [(128, 128), (1, 128), (128, 1)]:
        codes, scale_inv = quantize_block(x, (bm, bk))
        for i, j in [(0, 0), (scale_inv.shape[0] - 1, scale_inv.shape[1] - 1)]:
            cell = (slice(i * bm, (i + 1) * bm), slice(j * bk, (j + 1) * bk))
            alone, scale_inv_alone = quantize_block(x[cell], (bm, bk))
            assert_same_bytes(codes[cell], alone)
            assert_same_bytes(scale_inv[i : i + 1, j : j + 1], scale_inv_alone)


def test_leading_dimensions_are_rows():
    x = seeded(2, 3, 200).bfloat16()
    codes, scale_inv = quantize_block(x, (1, 128))
    flat_codes, flat_scale_inv = quantize_block(x.view(6, 200), (1, 128))
    assert codes.shape == x.shape and scale_inv.shape == (2, 3, 2)
    assert_same_quantised((codes.view(6, 200), scale_inv.view(6, 2)), (flat_codes, flat_scale_inv))
    values = dequantize_block(codes, scale_inv, (1, 128))
    assert torch.equal(values.view(6, 200), dequantize_block(flat_codes, flat_scale_inv, (1, 128)))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("block", "mode", "dtype", "scale_inv", "codes"),
    [
        ([0.0, -0.0], "pow2", E4M3, 1.0, [0x00, 0x80]),
        ([448.0, 1.0], "pow2", E4M3, 1.0, [0x7E, 0x38]),
        ([450.0, 1.0], "pow2", E4M3, 2.0, [0x76, 0x30]),  # one step of bfloat16 above 448
        ([INF, 500.0, -1.0], "pow2", E4M3, 1.0, [0x7E, 0x7E, 0xB8]),  # unscaled, saturating
        ([-INF, 1e6, 1.0], "fp32", E5M2, 1.0, [0xFB, 0x7B, 0x3C]),
        ([NAN, 224.0, -NAN], "pow2", E4M3, 0.5, [0x7F, 0x7E, 0x7F]),  # a NaN costs only itself
        ([NAN, NAN], "pow2", E4M3, 1.0, [0x7F, 0x7F]),
        ([NAN, INF], "fp32", E5M2, 1.0, [0x7F, 0x7B]),
        ([2.0**-126, 0.0], "pow2", E4M3, 2.0**-127, [0x40, 0x00]),  # the scale stops at 2**127
        ([2.0**-133, 0.0], "pow2", E4M3, 2.0**-127, [0x08, 0x00]),  # a subnormal of both sources
    ],
)
def test_the_edges(block, mode, dtype, scale_inv, codes, source):
    got_codes, got_scale_inv = quantize_block(
        torch.tensor([block]).to(source), (1, 128), mode, dtype
    )
    assert got_scale_inv.tolist() == [[scale_inv]]
    assert got_codes.view(torch.uint8).tolist() == [codes]


def test_an_overflowing_scale_is_the_largest_number_of_the_source():
    tiny = torch.tensor([[2.0**-24]])
    _, half = quantize_block(tiny.half(), (1, 128), "fp32", E5M2)
    _, single = quantize_block(tiny, (1, 128), "fp32", E5M2)
    assert half.item() == single.item() == torch.tensor(2.0**-24 / 57344).item()
    for source in (torch.bfloat16, torch.float32):
        subnormal = torch.tensor([[2.0**-133]]).to(source)
        _, scale_inv = quantize_block(subnormal, (1, 128), "fp32")
        assert scale_inv.item() == (1 / torch.tensor(torch.finfo(source).max)).item()


def test_the_floor_gives_small_blocks_one_scale():
    x = torch.tensor([[1e-9], [0.0], [1.0]])
    _, scale_inv = quantize_block(x, (1, 128), amax_epsilon=448 * 2.0**-33)
    assert scale_inv.view(-1).tolist() == [2.0**-33, 2.0**-33, 2.0**-8]


def test_no_rows_have_no_scales():
    codes, scale_inv = quantize_block(torch.zeros(0, 300))
    assert codes.shape == (0, 300) and scale_inv.shape == (0, 3)
    assert dequantize_block(codes, scale_inv).shape == (0, 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 2, dtype=torch.float64),), "float64; what is quantised must be"),
        ((torch.zeros(2, 2, 2),), "flatten the leading dimensions"),
        ((torch.zeros(2, 2), (0, 128)), "is no block"),
        ((torch.zeros(2, 2), (1, 128), "pow2", torch.float16), "torch.float8_e4m3fn"),
        ((torch.zeros(2, 2), (1, 128), "pow3"), "scale_mode='pow3'"),
    ],
)
def test_what_cannot_be_quantised_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize_block(*arguments)


def test_codes_that_do_not_fit_their_scales_are_refused():
    codes, scale_inv = quantize_block(torch.randn(4, 130))
    with pytest.raises(ValueError, match="without padding"):
        dequantize_block(codes, torch.nn.functional.pad(scale_inv, (0, 2)))
    with pytest.raises(ValueError, match="codes have dtype torch.uint8"):
        dequantize_block(codes.view(torch.uint8), scale_inv)


def test_the_package_is_importable_without_torch():
    program = "import sys, megatron_rl.precision; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr
