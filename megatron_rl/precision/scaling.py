"""From the largest magnitude of a block to its scale: the rule of Transformer Engine.

    amax      = max |x| over the block, NaN elements ignored, in FP32
    amax      = amax_epsilon              if amax < amax_epsilon
    scale     = 1                         if amax is 0 or infinite: the block is stored unscaled
    scale     = fp8_max / amax            correctly rounded FP32 division
    scale     = largest finite x.dtype    if the division overflowed
    scale     = 2 ** floor(log2(scale))   in pow2 mode only
    scale_inv = 1 / scale                 FP32; exact in pow2 mode

The code of an element is ``x * scale`` in FP32, rounded to the nearest FP8 value (ties to even) and
saturated at ``fp8_max``; its value is ``code * scale_inv``. An infinity therefore costs only the
resolution of its own block, and a NaN only itself.

Two traps. ``fp8_max / amax`` with a Python float is a reciprocal and a product in torch, which
rounds twice; a tensor must be divided by a tensor. And the smallest amax give ``scale = 2**127``,
whose inverse is an FP32 subnormal: nothing here may run with denormals flushed to zero.
"""

from collections.abc import Iterator

import torch

from megatron_rl.precision.formats import E4M3_MAX, E5M2_MAX, ScaleMode

_FP8_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_CHUNK_BYTES = 1 << 20
_EXPONENT_BITS = -0x00800000  # sign and exponent of an FP32, as an int32 mask


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of an FP8 dtype.

    Raises:
        ValueError: ``dtype`` is neither ``float8_e4m3fn`` nor ``float8_e5m2``.
    """
    if dtype not in _FP8_MAX:
        raise ValueError(
            f"dtype={dtype} is not a format that operands are quantised to; use "
            "torch.float8_e4m3fn or torch.float8_e5m2"
        )
    return _FP8_MAX[dtype]


def scale_from_amax(
    amax: torch.Tensor,
    *,
    scale_mode: ScaleMode,
    dtype: torch.dtype,
    source_dtype: torch.dtype,
    amax_epsilon: float = 0.0,
) -> torch.Tensor:
    """The scale that a block's elements are multiplied by.

    Args:
        amax: Largest magnitudes, float32, any shape, none of them NaN.
        scale_mode: ``pow2`` rounds the scale down to a power of two, ``fp32`` leaves it.
        dtype: The FP8 dtype of the codes.
        source_dtype: The dtype that is quantised; its largest finite value bounds the scale.
        amax_epsilon: Floor under ``amax``.

    Returns:
        Scales, float32, of the shape of ``amax``; every one finite and positive.

    Raises:
        ValueError: ``scale_mode`` or ``dtype`` is not one of those above.
    """
    assert amax.dtype == torch.float32, amax.dtype
    if scale_mode not in ("pow2", "fp32"):
        raise ValueError(
            f"scale_mode={scale_mode!r} is no rounding of scales; use 'pow2' or 'fp32'"
        )
    amax = amax.clamp(min=amax_epsilon) if amax_epsilon else amax
    scale = torch.full_like(amax, fp8_max(dtype)) / amax
    scale.nan_to_num_(nan=torch.nan, posinf=torch.finfo(source_dtype).max)
    if scale_mode == "pow2":
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return scale.masked_fill((amax == 0) | (amax == torch.inf), 1.0)


def powers_of_two(scales: torch.Tensor) -> bool:
    """Whether every one of some float32 scales is a (positive) power of two."""
    return bool((torch.frexp(scales)[0] == 0.5).all())


def spans(size: int, block: int) -> Iterator[tuple[slice, slice, int]]:
    """Splits an axis into its whole blocks and the partial one at its end.

    Yields:
        ``(elements, blocks, length)``: a slice of the axis, the slice of its blocks, and the
        length of each of those blocks; at most two, none of them empty.
    """
    whole = size // block
    if whole:
        yield slice(0, whole * block), slice(0, whole), block
    if size % block:
        yield slice(whole * block, size), slice(whole, whole + 1), size % block


def blocks_of(
    x: torch.Tensor, per_block: torch.Tensor, block_shape: tuple[int, int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs views of a matrix, one block a cell, with views of what is held per block.

    Args:
        x: ``[M, K]``.
        per_block: ``[ceil(M / bm), ceil(K / bk)]``.
        block_shape: ``(bm, bk)``.

    Yields:
        ``(x [i, r, j, c], per_block [i, j])`` where ``r x c`` is the size of these blocks: the
        whole blocks, then the partial ones of the last column and row. No element is copied.
    """
    for rows, row_blocks, r in spans(x.shape[0], block_shape[0]):
        for columns, column_blocks, c in spans(x.shape[1], block_shape[1]):
            of_blocks = per_block[row_blocks, column_blocks]
            i, j = of_blocks.shape
            yield x[rows, columns].view(i, r, j, c), of_blocks


def row_chunks(
    x: torch.Tensor, block_rows: int, itemsize: int
) -> tuple[int, list[tuple[slice, slice]]]:
    """Cuts a matrix into runs of whole block rows whose scratch space stays in the cache.

    A temporary of the size of the matrix costs more in page faults than the arithmetic on it.

    Args:
        x: ``[M, K]``.
        block_rows: Rows of a block.
        itemsize: Bytes of an element of the scratch space.

    Returns:
        The most rows of a chunk, and of every chunk the slices of its rows and block rows.
    """
    m, k = x.shape
    block_count = max(1, _CHUNK_BYTES // max(1, k * itemsize * block_rows))
    rows = block_count * block_rows
    starts = range(0, m, rows)
    chunks = [
        (slice(start, min(m, start + rows)), slice(i * block_count, (i + 1) * block_count))
        for i, start in enumerate(starts)
    ]
    return min(rows, m), chunks


def multiply_blocks_(
    x: torch.Tensor, per_block: torch.Tensor, block_shape: tuple[int, int]
) -> None:
    """Multiplies every block of ``x`` by its own number, in place."""
    for part, factor in blocks_of(x, per_block, block_shape):
        part.mul_(factor[:, None, :, None])


def block_amax(x: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of every block; NaN where the block has one.

    Floats without their sign bit are ordered as the integers of the same bits, and NaN above all.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32.
        block_shape: ``(bm, bk)``.

    Returns:
        ``[ceil(M / bm), ceil(K / bk)]`` float32.
    """
    (m, k), (bm, bk) = x.shape, block_shape
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits, unsigned = x.view(integer), torch.iinfo(integer).max
    amax = bits.new_empty((-(-m // bm), -(-k // bk)))
    rows, chunks = row_chunks(x, bm, x.element_size())
    scratch = bits.new_empty((rows, k))
    for rows_of_chunk, block_rows in chunks:
        chunk = bits[rows_of_chunk]
        magnitude = torch.bitwise_and(chunk, unsigned, out=scratch[: chunk.shape[0]])
        for part, out in blocks_of(magnitude, amax[block_rows], block_shape):
            torch.amax(part, (1, 3), out=out)
    return amax.view(x.dtype).to(torch.float32)
