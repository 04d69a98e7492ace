"""Block-FP8 linear layers of vLLM on a CPU, by the reference quantiser: the trainer's own product.

vLLM's kernel for this format on CPUs needs AMX and leaves activations unquantised. This one
quantises both operands and multiplies them dequantised, with the same function that the trainer's
layers call (:mod:`megatron_rl.precision.products`), so equal codes and inputs give equal outputs in
every bit. It is an emulation of FP8 arithmetic.

Registered by :mod:`megatron_rl.rollout.plugin`; only vLLM's processes load it.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.platforms import current_platform

from megatron_rl.precision import BlockFormat
from megatron_rl.precision.engines import LINEAR_INPUT
from megatron_rl.precision.flows import INPUT
from megatron_rl.precision.products import block_linear, operand_dtype
from megatron_rl.precision.quantize import dequantize_block


class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """W8A8: weights in 128 x 128 blocks, activations in 1 x 128."""

    apply_input_quant = False  # done by the product itself

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        fields = get_current_vllm_config().additional_config.get(LINEAR_INPUT)
        self.input_format = BlockFormat(**fields) if fields else INPUT

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Any CPU."""
        return (True, None) if current_platform.is_cpu() else (False, "requires a CPU")

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Blocks of 128 x 128 over an input dimension of whole blocks."""
        shape = config.weight_quant_key.scale.group_shape
        if (shape.row, shape.col) != (128, 128):
            return False, f"blocks are {shape.row} x {shape.col}, not 128 x 128"
        if config.weight_shape[1] % 128:
            return False, f"the input dimension {config.weight_shape[1]} is no multiple of 128"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Dequantises the weight once; codes and scales stay as they were sent."""
        params = self._get_layer_params(layer)
        layer.dequantised_weight = dequantize_block(
            params.weight.data,
            params.block_scale.data,
            (128, 128),
            operand_dtype(self.input_format, self.config.out_dtype),
        )

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The product; the bias is added to its rounded result, as in training."""
        output = block_linear(x, layer.dequantised_weight, self.input_format)
        return output if bias is None else output + bias

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Part of vLLM's interface; never reached, since ``apply_weights`` does all."""
        raise NotImplementedError
