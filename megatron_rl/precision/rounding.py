"""FP8 values by integer arithmetic, for a CPU: where torch's own conversions take a slow path.

:func:`decode` turns codes into float32. :func:`round_bfloat16` rounds a bfloat16 matrix to the
values that FP8 codes with power-of-two scales can hold, without making a code. Both give exactly
what the plain conversions give, which the tests hold them to; neither defines a rule.
"""

import torch

from megatron_rl.precision.scaling import block_amax, blocks_of, row_chunks, scale_from_amax

_SIGN = -0x8000  # sign bit of a 16-bit float, as an int16 mask
_BF16_EXPONENT = 0x7F80
_BF16_MANTISSA_BITS = 7
_LIMIT = 2.0**96
_BF16_HALF = 0x40  # the mantissa of 1.5

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
    """A bfloat16 matrix rounded to what FP8 codes with power-of-two scales hold.

    A power-of-two scale moves only the exponent, so rounding can be done where the numbers are. An
    element of exponent ``e`` has neighbours ``q = 2 ** (e - mantissa bits)`` apart; below the
    smallest normal code of its block, ``q`` stops shrinking. Adding ``192 q`` in bfloat16, which
    keeps eight bits, rounds to a multiple of ``q``, ties to even; subtracting it again is exact.

    Args:
        x: ``[M, K]`` bfloat16, on the CPU.
        block_shape: ``(bm, bk)``.
        dtype: The FP8 dtype.
        amax_epsilon: Floor under a block's largest magnitude.

    Returns:
        ``[M, K]`` bfloat16, or None if some element or scale reaches ``2**96`` or is NaN: there
        ``192 q`` may leave the range of bfloat16.
    """
    amax = block_amax(x, block_shape)
    scale = scale_from_amax(
        amax,
        scale_mode="pow2",
        dtype=dtype,
        source_dtype=torch.bfloat16,
        amax_epsilon=amax_epsilon,
    )
    is_in_range = amax.numel() and float(amax.amax()) < _LIMIT and float(scale.amax()) < _LIMIT
    if not is_in_range or amax_epsilon >= _LIMIT:
        return None
    smallest = (_SMALLEST_NORMAL[dtype] / scale).to(torch.bfloat16).view(torch.int16)
    # From the bits of 2**e to those of 192 q: the exponent is raised, the first mantissa bit set.
    to_shift = (7 - _MANTISSA_BITS[dtype] << _BF16_MANTISSA_BITS) + _BF16_HALF
    rounded = torch.empty_like(x)
    rows, chunks = row_chunks(x, block_shape[0], itemsize=2)
    scratch = torch.empty((rows, x.shape[1]), dtype=torch.int16)
    for of_chunk, block_rows in chunks:
        chunk, out = x[of_chunk], rounded[of_chunk]
        bits = torch.bitwise_and(
            chunk.view(torch.int16), _BF16_EXPONENT, out=scratch[: chunk.shape[0]]
        )
        for part, floor in blocks_of(bits, smallest[block_rows], block_shape):
            torch.maximum(part, floor[:, None, :, None], out=part)
        shift = bits.add_(to_shift).view(torch.bfloat16)
        torch.add(chunk, shift, out=out)
        out.sub_(shift)
        # A negative element that rounds to zero is a negative zero.
        out.view(torch.int16).bitwise_or_(
            torch.bitwise_and(chunk.view(torch.int16), _SIGN, out=bits)
        )
    return rounded
