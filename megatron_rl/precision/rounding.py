"""FP8 values by integer arithmetic, for a CPU: where torch's own conversions take a slow path.

:func:`decode` turns codes into float32. :func:`round_bfloat16` rounds a bfloat16 matrix to the
values that FP8 codes with power-of-two scales can hold, without making a code. Both give exactly
what the plain conversions give, which the tests hold them to; neither defines a rule.
"""

import torch

from megatron_rl.precision.scaling import blocks_of, scale_from_amax

_SIGN = -0x8000  # sign bit of a 16-bit float, as an int16 mask
_BF16_MAGNITUDE = 0x7FFF
_BF16_EXPONENT = 0x7F80
_BF16_MANTISSA_BITS = 7

_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_SMALLEST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The values of FP8 codes, exactly, as float32 of the same shape.

    An E5M2 is the upper half of a float16. An E4M3 has one exponent bit less and a bias of 7
    instead of 15: moved below a float16's sign bit, it reads as its value / 256, subnormals
    included, and its only NaN as 480 / 256.
    """
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    half = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == torch.float8_e5m2:
        half.bitwise_left_shift_(8)
        return half.view(torch.float16).to(torch.float32)
    # The sign came along in every bit above the code; bit 14 is the one that must not have it.
    half.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = half.view(torch.float16).to(torch.float32).mul_(256.0)
    magnitude = codes.view(torch.uint8) & 0x7F
    if codes.numel() and int(magnitude.amax()) == 0x7F:
        values.masked_fill_(magnitude == 0x7F, torch.nan)
    return values


def round_bfloat16(
    x: torch.Tensor, block_shape: tuple[int, int], dtype: torch.dtype, amax_epsilon: float
) -> torch.Tensor | None:
    """A bfloat16 matrix rounded to what FP8 codes with power-of-two scales hold; in float32.

    A power-of-two scale moves only the exponent, so rounding can be done where the numbers are. An
    element of exponent ``e`` has neighbours ``q = 2 ** (e - mantissa bits)`` apart; below the
    smallest normal code of its block, ``q`` stops shrinking. Adding and subtracting
    ``1.5 * 2**23 * q`` in float32 rounds to a multiple of ``q``, ties to even, because that sum has
    no bit below ``q``.

    Args:
        x: ``[M, K]`` bfloat16, on the CPU.
        block_shape: ``(bm, bk)``.
        dtype: The FP8 dtype.
        amax_epsilon: Floor under a block's largest magnitude.

    Returns:
        ``[M, K]`` float32, or None if some block is neither zero nor of a magnitude between
        ``2**-80`` and ``2**96``: there the sums above would leave the range of float32.
    """
    bits = x.contiguous().view(torch.int16)
    exponent = bits & _BF16_MAGNITUDE
    amax = _integer_amax(exponent, block_shape).view(torch.bfloat16).to(torch.float32)
    if not bool(((amax == 0) | ((amax >= 2.0**-80) & (amax <= 2.0**96))).all()):
        return None
    scale = scale_from_amax(
        amax,
        scale_mode="pow2",
        dtype=dtype,
        source_dtype=torch.bfloat16,
        amax_epsilon=amax_epsilon,
    )
    smallest = (_SMALLEST_NORMAL[dtype] / scale).to(torch.bfloat16).view(torch.int16)
    exponent.bitwise_and_(_BF16_EXPONENT)
    for part, floor in blocks_of(exponent, smallest, block_shape):
        torch.maximum(part, floor[:, None, :, None], out=part)
    # To the bits of 1.5 * 2**23 * q: the exponent is raised, and 0.5 is the first mantissa bit.
    raised = (23 - _MANTISSA_BITS[dtype]) << _BF16_MANTISSA_BITS
    exponent.add_(raised + (1 << (_BF16_MANTISSA_BITS - 1)))
    shift = exponent.view(torch.bfloat16).to(torch.float32)
    rounded = x.to(torch.float32).add_(shift).sub_(shift)
    # A negative element that rounds to zero is a negative zero.
    return torch.copysign(rounded, x, out=rounded)


def _integer_amax(magnitude: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """Largest of the non-negative integers of each block."""
    (m, k), (bm, bk) = magnitude.shape, block_shape
    amax = magnitude.new_empty((-(-m // bm), -(-k // bk)))
    for part, out in blocks_of(magnitude, amax, block_shape):
        out.copy_(part.amax((1, 3)))
    return amax
