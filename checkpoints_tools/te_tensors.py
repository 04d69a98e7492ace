"""Transformer Engine's FP8 tensors in pickles, without Transformer Engine.

TE keeps a weight in FP8 as a tensor class of its own, and pickles it as a call of a function with
the bytes, the scales and what they mean. The table here puts plain classes in the place of TE's, so
that such a file is read where TE cannot be installed, and nothing that it names is run:

- `Float8BlockwiseQTensor`, scaled in blocks of 128 x 128: codes uint8 `[N, K]` beside scales FP32
  `[ceil(N / 128), round_up(ceil(K / 128), 4)]`, whose last columns are padding that TE never
  writes. The transposed copy has the same codes, and serves where the other was given up.
- `Float8Tensor`, one scale: codes uint8 `[N, K]` and a scale FP32 `[1]`.

Sources: transformer_engine/pytorch/tensor/float8_blockwise_tensor.py and float8_tensor.py, 2.3 to
2.20, read and, for 2.20.2, run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.precision import dequantize_block

BLOCK = 128
_ELEMENTS = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True, slots=True)
class TETensor:
    """A weight as codes and scales."""

    codes: Tensor
    """FP8 `[N, K]`."""
    scale_inv: Tensor
    """FP32: `[ceil(N / 128), ceil(K / 128)]`, or `[1]` for the whole tensor."""
    dtype: torch.dtype
    """What the tensor stands for outside of products: BF16, as a rule."""

    @property
    def is_block_scaled(self) -> bool:
        """Whether there is a scale a block, rather than one."""
        return self.scale_inv.ndim == 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.codes.shape)

    def dequantize(self) -> Tensor:
        """The values, in `dtype`; exact in BF16 where scales are powers of two."""
        if self.is_block_scaled:
            return dequantize_block(self.codes, self.scale_inv, (BLOCK, BLOCK)).to(self.dtype)
        return (self.codes.float() * self.scale_inv).to(self.dtype)


class _DType:
    """TE's enum of dtypes: an IntEnum by now, in older versions a class of the compiled module."""

    value: int

    def __init__(self, value: int = -1) -> None:
        self.value = value

    def __setstate__(self, value: int) -> None:
        self.value = value

    def element(self) -> torch.dtype:
        if self.value not in _ELEMENTS:
            raise ValueError(f"a Transformer Engine tensor has codes of type {self.value}, no FP8")
        return _ELEMENTS[self.value]


class _Quantizer:
    """TE's quantisers: how a tensor would be quantised again, which is not needed."""


class _BlockTensor:
    """`Float8BlockwiseQTensor`; what makes one is called with these arguments."""

    @staticmethod
    def _make_in_reduce_ex(
        shape: torch.Size,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: _DType,
        dtype: torch.dtype,
        quantizer: Any,
        is_2D_scaled: bool,
        *data_format: Any,
    ) -> TETensor:
        if not is_2D_scaled:
            raise ValueError(
                "a Transformer Engine weight is scaled in blocks of 1 x 128, which is not served; "
                "train with w_block_scaling_dim=2"
            )
        data, scale_inv, transposed = rowwise_data, rowwise_scale_inv, False
        if data is None or scale_inv is None:
            data, scale_inv, transposed = columnwise_data, columnwise_scale_inv, True
        if data is None or scale_inv is None:
            raise ValueError("a Transformer Engine weight has no codes")
        # Stacked layers have leading axes of size 1; the transposed copy has its own axis first.
        data = data.reshape(data.shape[0], -1) if transposed else data.reshape(-1, data.shape[-1])
        rows, columns = data.shape
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        if scale_inv.shape[0] != blocks[0] or scale_inv.shape[1] < blocks[1]:
            raise ValueError(
                f"a Transformer Engine weight of shape {list(data.shape)} has scales of shape "
                f"{list(scale_inv.shape)}"
            )
        # The padding goes here, before shards of several ranks are put together.
        scale_inv = scale_inv[:, : blocks[1]]
        if transposed:
            data, scale_inv = data.t(), scale_inv.t()
        codes = data.contiguous().view(fp8_dtype.element())
        if codes.numel() != torch.Size(shape).numel() or codes.shape[-1] != shape[-1]:
            raise ValueError(
                f"a Transformer Engine weight of shape {list(shape)} has codes of shape "
                f"{list(codes.shape)}"
            )
        return TETensor(codes=codes, scale_inv=scale_inv.contiguous(), dtype=dtype)


class _ScaledTensor:
    """`Float8Tensor`; what makes one is called with these arguments."""

    @staticmethod
    def _make_in_reduce_ex(
        data: Tensor | None,
        fp8_dtype: _DType,
        fp8_scale_inv: Tensor,
        dtype: torch.dtype,
        shape: torch.Size,
        data_transpose: Tensor | None = None,
    ) -> TETensor:
        if data is None:
            if data_transpose is None:
                raise ValueError("a Transformer Engine weight has no codes")
            data = data_transpose.reshape(data_transpose.shape[0], -1).t().contiguous()
        codes = data.reshape(-1, shape[-1]).view(fp8_dtype.element())
        return TETensor(codes=codes, scale_inv=fp8_scale_inv.reshape(1), dtype=dtype)


def te_getattr(owner: Any, name: str) -> Any:
    """In place of `getattr`: older versions pickled the function as an attribute of its class.

    Raises:
        ValueError: Anything else is asked for.
    """
    if owner in (_BlockTensor, _ScaledTensor) and name == "_make_in_reduce_ex":
        return owner._make_in_reduce_ex
    raise ValueError(f"an attribute {name!r} is asked for, which a weight has no use for")


_TENSOR = "transformer_engine.pytorch.tensor"
# (module, name) in the pickle -> what it becomes.
TE_CLASSES: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        (module, name): stand_in
        for modules, name, stand_in in (
            ((f"{_TENSOR}.float8_blockwise_tensor",), "Float8BlockwiseQTensor", _BlockTensor),
            ((f"{_TENSOR}.float8_blockwise_tensor",), "Float8BlockQuantizer", _Quantizer),
            (
                (f"{_TENSOR}.float8_blockwise_tensor",),
                "_make_float8_blockwise_tensor_in_reduce_ex",
                _BlockTensor._make_in_reduce_ex,
            ),
            (
                (f"{_TENSOR}.float8_tensor", "transformer_engine.pytorch.float8_tensor"),
                "Float8Tensor",
                _ScaledTensor,
            ),
            (
                (f"{_TENSOR}.float8_tensor",),
                "_make_float8_tensor_in_reduce_ex",
                _ScaledTensor._make_in_reduce_ex,
            ),
            (("transformer_engine.pytorch.constants", "transformer_engine_torch"), "DType", _DType),
            (("builtins", "__builtin__"), "getattr", te_getattr),
        )
        for module in modules
    }
)
