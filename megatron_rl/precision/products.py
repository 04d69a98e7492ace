"""Block-scaled products on operands that are quantised and held dequantised.

A block-scaled FP8 product multiplies codes and applies the scales of both operands to the partial
sum of each block of 128. With power-of-two scales ``code * scale_inv`` is exact in BF16 (four
significant bits times a power of two), so multiplying the *dequantised* operands by an ordinary
BF16 product, which accumulates in FP32, is the same up to the order of the sum. That is how FP8 is
computed on a CPU: in training and in rollout by the one function here, hence with one result.

Scales that are not powers of two need more than BF16's bits; their operands are FP32, and so is
the product.
"""

import torch
import torch.nn.functional as F

from megatron_rl.precision.engines import element_dtype
from megatron_rl.precision.formats import BlockFormat
from megatron_rl.precision.quantize import quantize_block, quantize_dequantize


def operand_dtype(fmt: BlockFormat, dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds a dequantised operand exactly: ``dtype`` itself, or FP32."""
    return dtype if fmt.scale_rounding == "pow2" else torch.float32


def quantize_operand(x: torch.Tensor, fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``x [M, K]`` in a format; codes and ``scale_inv`` as of ``quantize_block``."""
    return quantize_block(
        x, fmt.block_shape, fmt.scale_rounding, element_dtype(fmt.element), fmt.amax_epsilon
    )


def operand(x: torch.Tensor, fmt: BlockFormat, *, transposed: bool = False) -> torch.Tensor:
    """Quantises and dequantises one operand of a product.

    Args:
        x: ``[M, K]`` float.
        fmt: Format whose blocks lie along the columns.
        transposed: Lay the blocks along the rows instead: the tokens, in a weight gradient.

    Returns:
        ``[M, K]`` in :func:`operand_dtype`.
    """
    rows, columns = fmt.block_shape
    shape = (columns, rows) if transposed else (rows, columns)
    return quantize_dequantize(
        x,
        shape,
        fmt.scale_rounding,
        element_dtype(fmt.element),
        fmt.amax_epsilon,
        out_dtype=operand_dtype(fmt, x.dtype),
    )


def block_linear(x: torch.Tensor, weight: torch.Tensor, input_format: BlockFormat) -> torch.Tensor:
    """The forward product ``x W^T`` of a block-scaled linear layer.

    Args:
        x: ``[..., K]`` float, quantised here.
        weight: ``[N, K]``: the dequantised weight.
        input_format: Format of ``x``.

    Returns:
        ``[..., N]`` of the dtype of ``x``.
    """
    rows = x.reshape(-1, x.shape[-1])
    quantised = operand(rows, input_format).to(weight.dtype)
    if len(rows) == 1:
        # One row may take another kernel than many, with other bits.
        output = F.linear(quantised.repeat(2, 1), weight)[:1]
    else:
        output = F.linear(quantised, weight)
    return output.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
