"""Codes and scales out of a live Transformer Engine tensor, as vLLM reads them.

TE keeps a weight quantised in 128 x 128 blocks as a ``Float8BlockwiseQTensor``:

    _rowwise_data       uint8    [N, K]
    _rowwise_scale_inv  float32  [ceil(N / 128), round_up(ceil(K / 128), 4)]

The columns that round the scales up are never written; they are cut off here, on each
tensor-parallel rank before shards are joined.
"""

import torch

from megatron_rl.policy.fp8_linear import QuantisedWeight

BLOCK = 128


def is_quantised_tensor(tensor: torch.Tensor) -> bool:
    """Whether a parameter is held as codes and scales; knows TE's tensors without importing TE."""
    return hasattr(tensor, "_rowwise_scale_inv")


def plain_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter, in its nominal dtype; those of an unquantised one are shared."""
    parameter = parameter.detach()
    return parameter.dequantize() if is_quantised_tensor(parameter) else parameter


def read_codes(tensor: torch.Tensor) -> QuantisedWeight:
    """The row-wise codes and scales of a TE tensor, sharing its memory.

    Args:
        tensor: ``Float8BlockwiseQTensor`` (or its bare storage) of a matrix ``[N, K]``.

    Raises:
        ValueError: It holds no row-wise codes, or they are not in blocks of 128 x 128.
    """
    data, scale_inv = tensor._rowwise_data, tensor._rowwise_scale_inv
    if data is None or scale_inv is None:
        raise ValueError(
            "a Transformer Engine weight holds only its transposed codes, which nobody serves; "
            "keep row-wise usage on (update_usage(rowwise_usage=True)) until weights are exported"
        )
    if not tensor._is_2D_scaled:
        raise ValueError(
            "a Transformer Engine weight is scaled in blocks of 1 x 128, and is served in blocks "
            "of 128 x 128; leave w_block_scaling_dim at 2"
        )
    rows, columns = data.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    assert scale_inv.shape[0] == blocks[0] and scale_inv.shape[1] >= blocks[1], scale_inv.shape
    return QuantisedWeight(
        codes=data.view(_element(tensor)), scale_inv=scale_inv[:, : blocks[1]].contiguous()
    )


def _element(tensor: torch.Tensor) -> torch.dtype:
    """The FP8 dtype of a TE tensor's codes."""
    name = tensor._fp8_dtype.name
    return {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}[name]
