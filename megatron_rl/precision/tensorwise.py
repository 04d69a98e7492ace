"""FP8 with one scale for a whole tensor, from its own maximum: TE's ``Float8CurrentScaling``.

The rule is the block rule with the tensor as its one block and two differences: the scale is by
default not rounded to a power of two, and where it overflows it becomes the largest finite float32,
whatever dtype is quantised.
"""

import torch

from megatron_rl.precision.formats import ScaleMode
from megatron_rl.precision.quantize import (
    amax_without_nan,
    as_matrix,
    dequantize_block,
    encode,
)
from megatron_rl.precision.scaling import scale_from_amax


def quantize_tensor(
    x: torch.Tensor,
    scale_mode: ScaleMode = "fp32",
    dtype: torch.dtype = torch.float8_e4m3fn,
    amax_epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a tensor to FP8 with one scale.

    Args:
        x: bfloat16, float16 or float32, of at least one dimension.
        scale_mode: ``fp32`` leaves the scale, ``pow2`` rounds it down to a power of two.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        amax_epsilon: Floor under the largest magnitude.

    Returns:
        The codes, of the shape of ``x``, and ``scale_inv``, float32 ``[1]``.

    Raises:
        ValueError: A dtype or shape is not one of the above.
    """
    matrix = as_matrix(x, (1, 1))
    block_shape = (max(1, matrix.shape[0]), max(1, matrix.shape[1]))
    amax, is_finite = amax_without_nan(matrix, block_shape)
    scale = scale_from_amax(
        amax if x.numel() else amax.new_zeros((1, 1)),
        scale_mode=scale_mode,
        dtype=dtype,
        source_dtype=torch.float32,
        amax_epsilon=amax_epsilon,
    )
    codes = encode(matrix, scale, block_shape, dtype, is_finite=is_finite)
    return codes.view(x.shape), scale.reciprocal().view(1)


def dequantize_tensor(
    codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Multiplies FP8 codes by the tensor's scale, in float32, and rounds once.

    Args:
        codes: An FP8 dtype, of at least one dimension.
        scale_inv: float32 with one element.
        dtype: Of the result.

    Returns:
        The values, of the shape of ``codes``.

    Raises:
        ValueError: ``scale_inv`` does not have one element.
    """
    if scale_inv.numel() != 1:
        raise ValueError(
            f"scale_inv has shape {list(scale_inv.shape)}, but a tensor has one scale; use "
            "dequantize_block for scales of blocks"
        )
    if not codes.numel():
        return codes.to(dtype)
    matrix = codes.reshape(-1, codes.shape[-1])
    block_shape = (matrix.shape[0], matrix.shape[1])
    return dequantize_block(matrix, scale_inv.view(1, 1), block_shape, dtype).view(codes.shape)
