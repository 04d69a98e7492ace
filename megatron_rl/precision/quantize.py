"""The reference quantiser: block-scaled FP8 as Transformer Engine defines it, in plain torch.

    quantize_block       x [M, K] -> codes [M, K] FP8, scale_inv [ceil(M/bm), ceil(K/bk)] FP32
    dequantize_block     codes * scale_inv, rounded once to the wanted dtype
    quantize_dequantize  the second of the first, without making the codes where that is faster

The rule is in :mod:`megatron_rl.precision.scaling`. Blocks are 128x128 for weights, 1x128 for
operands scaled along the columns and 128x1 for those scaled along the rows; the block at an edge is
what is left of it, with nothing padded. Quantising the transpose with the transposed block shape
gives the transposed codes and scales.

Training on a CPU, the CPU kernel of rollout, weight sync, the checkpoint tools and the tests call
these functions; on CUDA they are the reference that kernels are compared with.
"""

import torch

from megatron_rl.precision.formats import ScaleMode
from megatron_rl.precision.rounding import decode, round_bfloat16
from megatron_rl.precision.scaling import (
    block_amax,
    fp8_max,
    multiply_blocks_,
    row_chunks,
    scale_from_amax,
)

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAN_CODE = 0x7F


def quantize_block(
    x: torch.Tensor,
    block_shape: tuple[int, int] = (128, 128),
    scale_mode: ScaleMode = "pow2",
    dtype: torch.dtype = torch.float8_e4m3fn,
    amax_epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a matrix to FP8 with one scale a block.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32; with blocks of one row also ``[..., K]``.
        block_shape: ``(bm, bk)``: rows and columns that share a scale.
        scale_mode: ``pow2`` rounds scales down to powers of two, ``fp32`` leaves them.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        amax_epsilon: Floor under a block's largest magnitude.

    Returns:
        The codes, of the shape of ``x``, and ``scale_inv``, float32
        ``[ceil(M / bm), ceil(K / bk)]`` (or ``[..., ceil(K / bk)]``): what a code is multiplied by.

    Raises:
        ValueError: A dtype, shape or mode is not one of the above.
    """
    matrix = as_matrix(x, block_shape)
    amax, is_finite = amax_without_nan(matrix, block_shape)
    scale = scale_from_amax(
        amax,
        scale_mode=scale_mode,
        dtype=dtype,
        source_dtype=x.dtype,
        amax_epsilon=amax_epsilon,
    )
    codes = encode(matrix, scale, block_shape, dtype, is_finite=is_finite)
    scale_shape = (*x.shape[:-1], scale.shape[1]) if block_shape[0] == 1 else scale.shape
    return codes.view(x.shape), scale.reciprocal().view(scale_shape)


def dequantize_block(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    block_shape: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiplies FP8 codes by their scales: the inverse of :func:`quantize_block`.

    The product is taken in float32 and rounded once. With ``pow2`` scales it is exact in bfloat16
    and float32 as long as it stays a normal number.

    Args:
        codes: ``[M, K]`` (or ``[..., K]`` with blocks of one row), an FP8 dtype.
        scale_inv: float32 ``[ceil(M / bm), ceil(K / bk)]`` (or ``[..., ceil(K / bk)]``).
        block_shape: ``(bm, bk)``.
        dtype: Of the result.

    Returns:
        The values, of the shape of ``codes``.

    Raises:
        ValueError: ``codes`` is not FP8, or ``scale_inv`` has another shape than the blocks.
    """
    if codes.dtype not in FP8_DTYPES:
        raise ValueError(
            f"codes have dtype {codes.dtype}; pass torch.float8_e4m3fn or torch.float8_e5m2, or "
            "bytes as codes.view(torch.float8_e4m3fn)"
        )
    matrix = codes.reshape(-1, codes.shape[-1])
    (m, k), (bm, bk) = matrix.shape, block_shape
    blocks = (-(-m // bm), -(-k // bk))
    expected = (*codes.shape[:-1], blocks[1]) if bm == 1 else blocks
    if scale_inv.shape != expected:
        raise ValueError(
            f"scale_inv has shape {list(scale_inv.shape)}, but codes {list(codes.shape)} in blocks "
            f"of {bm}x{bk} have {list(expected)} scales; pass the scales without padding"
        )
    scale_inv = scale_inv.reshape(blocks)
    out = torch.empty(matrix.shape, dtype=dtype, device=codes.device)
    for of_chunk, block_rows in row_chunks(matrix, bm, itemsize=4)[1]:
        values = decode(matrix[of_chunk])
        multiply_blocks_(values, scale_inv[block_rows], block_shape)
        out[of_chunk].copy_(values)
    return out.view(codes.shape)


def quantize_dequantize(
    x: torch.Tensor,
    block_shape: tuple[int, int] = (128, 128),
    scale_mode: ScaleMode = "pow2",
    dtype: torch.dtype = torch.float8_e4m3fn,
    amax_epsilon: float = 0.0,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """What :func:`dequantize_block` makes of the result of :func:`quantize_block`, bit for bit.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32; with blocks of one row also ``[..., K]``.
        block_shape: ``(bm, bk)``: rows and columns that share a scale.
        scale_mode: ``pow2`` rounds scales down to powers of two, ``fp32`` leaves them.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        amax_epsilon: Floor under a block's largest magnitude.
        out_dtype: Of the result.

    Returns:
        The values that an FP8 product sees, of the shape of ``x``.

    Raises:
        ValueError: A dtype, shape or mode is not one of the above.
    """
    fp8_max(dtype)
    matrix = as_matrix(x, block_shape)
    if scale_mode == "pow2" and matrix.dtype == torch.bfloat16 and matrix.device.type == "cpu":
        rounded = round_bfloat16(matrix, block_shape, dtype, amax_epsilon)
        if rounded is not None:
            return rounded.view(x.shape).to(out_dtype)
    codes, scale_inv = quantize_block(matrix, block_shape, scale_mode, dtype, amax_epsilon)
    return dequantize_block(codes, scale_inv, block_shape, out_dtype).view(x.shape)


def as_matrix(x: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """``x`` as ``[M, K]``, after the checks of what a caller may pass."""
    if x.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"x has dtype {x.dtype}; what is quantised must be bfloat16, float16 or float32"
        )
    if len(block_shape) != 2 or min(block_shape) < 1:
        raise ValueError(
            f"block_shape={block_shape} is no block; pass the rows and columns that share a scale, "
            "such as (128, 128) or (1, 128)"
        )
    if x.ndim == 2 or (x.ndim > 0 and block_shape[0] == 1):
        return x.reshape(-1, x.shape[-1])
    raise ValueError(
        f"x has shape {list(x.shape)}, but blocks of {block_shape[0]} rows need a matrix [M, K]; "
        "flatten the leading dimensions first"
    )


def amax_without_nan(
    matrix: torch.Tensor, block_shape: tuple[int, int]
) -> tuple[torch.Tensor, bool]:
    """The blocks' largest magnitudes, float32, and whether every element is known to be finite."""
    amax = block_amax(matrix, block_shape)
    # Asking waits for the device, which only the CPU does for free.
    if matrix.device.type == "cpu" and bool((amax < torch.inf).all()):
        return amax, True
    return block_amax(matrix.masked_fill(matrix.isnan(), 0.0), block_shape), False


def encode(
    matrix: torch.Tensor,
    scale: torch.Tensor,
    block_shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    is_finite: bool,
) -> torch.Tensor:
    """Multiplies blocks by their scales and rounds to FP8: nearest, ties to even, saturating.

    Args:
        matrix: ``[M, K]`` bfloat16, float16 or float32.
        scale: float32 ``[ceil(M / bm), ceil(K / bk)]``.
        block_shape: ``(bm, bk)``.
        dtype: The FP8 dtype.
        is_finite: Every element is finite and its scale follows from its block's maximum. Then none
            exceeds the limit by more than rounding, and saturation and NaN need no pass.

    Returns:
        ``[M, K]`` codes; every NaN is 0x7F.
    """
    limit = fp8_max(dtype)
    codes = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    rows, chunks = row_chunks(matrix, block_shape[0], itemsize=4)
    scratch = torch.empty((rows, matrix.shape[1]), dtype=torch.float32, device=matrix.device)
    for of_chunk, block_rows in chunks:
        scaled = scratch[: of_chunk.stop - of_chunk.start].copy_(matrix[of_chunk])
        multiply_blocks_(scaled, scale[block_rows], block_shape)
        if not is_finite:
            scaled.clamp_(-limit, limit)  # keeps NaN
        codes[of_chunk].copy_(scaled)
        if not is_finite:
            codes[of_chunk].view(torch.uint8).masked_fill_(scaled.isnan(), _NAN_CODE)
    return codes
