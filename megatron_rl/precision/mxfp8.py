"""MXFP8: FP8 with a power-of-two scale, stored as an eight-bit exponent, for 32 elements.

    amax  = max |x| over the block, NaN elements ignored, in FP32
    v     = amax * (1 / fp8_max)       one FP32 product with the rounded reciprocal
    scale = v rounded up to a power of two, held as its biased exponent b (E8M0)
    code  = x * 2**(127 - b), rounded to the nearest FP8 value, ties to even, saturating

As Transformer Engine rounds: ``b = 0`` where v is at most 2**-127, and such a block, or one of
zeros, is stored unscaled (its codes are zeros); ``b = 254`` where amax is infinite, and the finite
elements of that block vanish.

Values are ``code * 2**(b - 127)``. Scales are not padded and not swizzled.
"""

import torch

from megatron_rl.precision.formats import MX_BLOCK
from megatron_rl.precision.quantize import (
    amax_without_nan,
    as_matrix,
    dequantize_block,
    encode,
)
from megatron_rl.precision.scaling import fp8_max

_MANTISSA = 0x007FFFFF
_HALF_MANTISSA = 0x00400000  # alone, the bits of 2**-127, a subnormal
_INFINITE = 254


def quantize_mxfp8(
    x: torch.Tensor,
    block_shape: tuple[int, int] = (1, MX_BLOCK),
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises to FP8 with one E8M0 scale for 32 elements of a row, or of a column.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32; with blocks of one row also ``[..., K]``.
        block_shape: ``(1, 32)`` along the columns or ``(32, 1)`` along the rows.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The codes, of the shape of ``x``, and the scales to multiply them by,
        ``torch.float8_e8m0fnu`` ``[..., ceil(K / 32)]`` or ``[ceil(M / 32), K]``.

    Raises:
        ValueError: A dtype or shape is not one of the above.
    """
    if block_shape not in ((1, MX_BLOCK), (MX_BLOCK, 1)):
        raise ValueError(
            f"block_shape={block_shape} is no MX block; use (1, {MX_BLOCK}) or ({MX_BLOCK}, 1)"
        )
    matrix = as_matrix(x, block_shape)
    amax, is_finite = amax_without_nan(matrix, block_shape)
    biased = _biased_exponent(amax, dtype)
    # The bits of 2 ** (127 - b); the smallest, for b = 254, is a subnormal.
    bits = (254 - biased << 23).masked_fill(biased == _INFINITE, _HALF_MANTISSA)
    scale = bits.view(torch.float32).masked_fill(biased == 0, 1.0)
    codes = encode(matrix, scale, block_shape, dtype, is_finite=is_finite)
    scale_shape = (*x.shape[:-1], amax.shape[1]) if block_shape[0] == 1 else amax.shape
    exponents = biased.to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes.view(x.shape), exponents.view(scale_shape)


def dequantize_mxfp8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    block_shape: tuple[int, int] = (1, MX_BLOCK),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiplies FP8 codes by their E8M0 scales: the inverse of :func:`quantize_mxfp8`.

    Args:
        codes: ``[M, K]`` (or ``[..., K]`` with blocks of one row), an FP8 dtype.
        scale: ``torch.float8_e8m0fnu``, without padding.
        block_shape: ``(1, 32)`` or ``(32, 1)``.
        dtype: Of the result.

    Returns:
        The values, of the shape of ``codes``.

    Raises:
        ValueError: ``scale`` has another shape than the blocks.
    """
    return dequantize_block(codes, scale.to(torch.float32), block_shape, dtype)


def _biased_exponent(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``amax / fp8_max`` rounded up to a power of two, as its biased exponent: int32, 0 to 254."""
    bits = (amax * (1.0 / fp8_max(dtype))).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    is_below = (exponent == 0) & (mantissa <= _HALF_MANTISSA)
    is_rounded_up = (mantissa > 0) & ~is_below
    return (exponent + is_rounded_up.to(torch.int32)).clamp(max=_INFINITE)
