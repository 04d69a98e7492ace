"""Block-scaled FP8 linear layers on a CPU, chosen by module spec in place of Megatron's own.

    forward          y  = q(x) q(W)^T     x in 1 x 128 along its features, W in 128 x 128
    data gradient    dx = q(dy) q(W)      dy in 1 x 128 along its features, the same codes of W
    weight gradient  dW = q'(dy)^T q'(x)  both in 1 x 128 along the tokens

which is what Transformer Engine computes under ``Float8BlockScaling``. Here the operands are
quantised by the reference quantiser and multiplied dequantised
(:mod:`megatron_rl.precision.products`): an emulation of FP8, the same in every bit as what the
rollout engine computes on a CPU.

The weight's codes are made from the parameter, which is the BF16 rounding of the FP32 master, once
per optimizer step; the same codes go to the rollout engine. Communication over tensor-parallel
ranks is Megatron's, on unquantised tensors.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_rl.models.layout import same_bits
from megatron_rl.precision.formats import LinearFormats
from megatron_rl.precision.products import (
    block_linear,
    operand,
    operand_dtype,
    quantize_operand,
)
from megatron_rl.precision.quantize import dequantize_block


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """A weight as the products of this step use it; a rank's own piece."""

    codes: torch.Tensor
    """``[N, K]`` FP8."""
    scale_inv: torch.Tensor
    """``[ceil(N / 128), ceil(K / 128)]`` float32."""


@dataclass(frozen=True, kw_only=True)
class _HeldWeight(QuantisedWeight):
    operand: torch.Tensor
    """``[N, K]``: codes times scales."""


class BlockScaledLinear(abc.ABC):
    """A Megatron linear layer, on any platform, whose operands are block-scaled FP8."""

    weight: torch.nn.Parameter
    formats: LinearFormats
    """Formats of the operands, as the layer computes them."""

    @abc.abstractmethod
    def quantised_weight(self) -> QuantisedWeight:
        """The weight's codes and scales, those that the products use."""

    @abc.abstractmethod
    def operand_fault(self) -> str | None:
        """What is wrong with the codes that the products use, or None."""

    @abc.abstractmethod
    def invalidate(self) -> None:
        """To be called whenever the weight has changed."""


def weight_fault(held: QuantisedWeight, fresh: QuantisedWeight) -> str | None:
    """How codes and scales in use differ from those made of the weight now, or None."""
    if not same_bits(held.codes, fresh.codes):
        return "its codes are not those of its weight"
    if not same_bits(held.scale_inv, fresh.scale_inv):
        return "its scales are not those of its weight"
    return None


class _EmulatedLinear(BlockScaledLinear):
    """What column- and row-parallel layers share; mixed in front of Megatron's class."""

    _held: _HeldWeight | None

    def quantised_weight(self) -> _HeldWeight:
        """See the base class; made at the first use after :meth:`invalidate`."""
        if self._held is None:
            fmt, weight = self.formats.weight, self.weight.detach()
            codes, scale_inv = quantize_operand(weight, fmt)
            dequantised = dequantize_block(
                codes, scale_inv, fmt.block_shape, operand_dtype(fmt, weight.dtype)
            )
            self._held = _HeldWeight(codes=codes, scale_inv=scale_inv, operand=dequantised)
        return self._held

    def operand_fault(self) -> str | None:
        """See the base class."""
        held = self.quantised_weight()
        self.invalidate()
        fresh = self.quantised_weight()
        for what, ours, right in (
            ("its codes are not those of its weight", held.codes, fresh.codes),
            ("its scales are not those of its weight", held.scale_inv, fresh.scale_inv),
            (
                "what it multiplies by is not its codes times its scales",
                held.operand,
                fresh.operand,
            ),
        ):
            if not same_bits(ours, right):
                return what
        return None

    def invalidate(self) -> None:
        """Forgets the codes."""
        self._held = None

    def _forward_impl(
        self,
        input: torch.Tensor,  # noqa: A002 - Megatron's name
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> torch.Tensor:
        """Megatron's hook for the product; the caller does what follows it."""
        assert weight is self.weight, "a borrowed weight"
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(  # noqa: A001
                input, tensor_parallel_output_grad=True, group=tp_group
            )
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)  # noqa: A001
        output = _BlockLinear.apply(input, weight, self.quantised_weight().operand, self.formats)
        return output if bias is None else output + bias


class BlockScaledColumnParallelLinear(_EmulatedLinear, ColumnParallelLinear):
    """Column-parallel linear layer with block-scaled FP8 products."""

    def __init__(self, *args: Any, formats: LinearFormats, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.formats, self._held = formats, None


class BlockScaledRowParallelLinear(_EmulatedLinear, RowParallelLinear):
    """Row-parallel linear layer with block-scaled FP8 products."""

    def __init__(self, *args: Any, formats: LinearFormats, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.formats, self._held = formats, None


class _BlockLinear(torch.autograd.Function):
    """``apply(x [..., K], weight [N, K], dequantised weight [N, K], formats) -> [..., N]``."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        dequantised: torch.Tensor,
        formats: LinearFormats,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, dequantised)
        ctx.formats, ctx.weight_dtype = formats, weight.dtype
        return block_linear(x, dequantised, formats.input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # noqa: D102
        x, dequantised = ctx.saved_tensors
        formats = ctx.formats
        grad_TN = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            by_feature = operand(grad_TN, formats.output_gradient).to(dequantised.dtype)
            grad_x = (by_feature @ dequantised).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            x_TK = x.reshape(-1, x.shape[-1])
            by_token = operand(grad_TN, formats.output_gradient, transposed=True)
            x_by_token = operand(x_TK, formats.input, transposed=True).to(by_token.dtype)
            grad_weight = (by_token.t() @ x_by_token).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None


def block_scaled_linears(model: torch.nn.Module) -> Iterator[tuple[str, BlockScaledLinear]]:
    """The block-scaled layers of a model, by local name."""
    for name, module in model.named_modules():
        if isinstance(module, BlockScaledLinear):
            yield name, module


def invalidate_codes(model: torch.nn.Module) -> None:
    """Tells every block-scaled layer of a model that its weight has changed."""
    for _, linear in block_scaled_linears(model):
        linear.invalidate()
