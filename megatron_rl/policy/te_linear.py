"""Block-scaled FP8 linear layers on CUDA: Megatron's wrappers of Transformer Engine's modules.

Drop-in for :mod:`megatron_rl.policy.fp8_linear`, which computes the same products without TE. Here
TE quantises and multiplies; this module says in which formats, reads the codes and scales back for
the rollout engine, and keeps two things as they are without TE:

- The bias is added to the rounded product, as vLLM does, and not inside it.
- A norm stays a module of its own in front of the layer, so that parameters have the names they
  have without TE, and norms the rounding of rollout's.

Loaded on CUDA only: it imports TE through Megatron.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.fp8_utils import get_fp8_recipe

from megatron_rl.policy.fp8_linear import (
    BlockScaledLinear,
    QuantisedWeight,
    weight_fault,
)
from megatron_rl.policy.te_export import is_quantised_tensor, read_codes
from megatron_rl.precision.formats import LinearFormats
from megatron_rl.precision.products import quantize_operand
from megatron_rl.precision.te import quantizer_format, recipe_formats


class _TransformerEngineLinear(BlockScaledLinear):
    """What column- and row-parallel layers share; mixed in front of Megatron's class."""

    declared: LinearFormats
    """Formats of the flow."""
    caller_adds_bias: bool

    @property
    def formats(self) -> LinearFormats:  # type: ignore[override]
        """Formats of the live quantisers; before the first pass, of the recipe they will be of."""
        forward = self.quantizers["scaling_fwd"]  # type: ignore[attr-defined]
        backward = self.quantizers["scaling_bwd"]  # type: ignore[attr-defined]
        if not forward:
            return recipe_formats(get_fp8_recipe(self.config))  # type: ignore[attr-defined]
        inputs, weight = forward[0], forward[1]
        return LinearFormats(
            weight=quantizer_format(weight),
            input=quantizer_format(inputs),
            output_gradient=quantizer_format(backward[0])
            if backward
            else self.declared.output_gradient,
        )

    def quantised_weight(self) -> QuantisedWeight:
        """See the base class.

        A parameter in FP8 is its own codes and scales. Otherwise they are made from the parameter:
        TE makes the same ones for its products, and keeps them in a workspace.
        """
        if is_quantised_tensor(self.weight):
            return read_codes(self.weight)
        codes, scale_inv = quantize_operand(self.weight.detach(), self.declared.weight)
        return QuantisedWeight(codes=codes, scale_inv=scale_inv)

    def operand_fault(self) -> str | None:
        """See the base class: compares TE's workspace with the reference quantiser."""
        workspace = self._fp8_workspaces.get("weight")  # type: ignore[attr-defined]
        if workspace is None or self.is_first_microbatch:
            return None  # TE quantises at the next pass
        return weight_fault(read_codes(workspace), self.quantised_weight())

    def invalidate(self) -> None:
        """Makes TE quantise the weight anew at the next pass, whoever calls it."""
        self.is_first_microbatch = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[..., K]`` to ``([..., N], None)``, or with the bias where the caller adds it."""
        output, bias = super().forward(x)  # type: ignore[misc]
        if bias is None or self.caller_adds_bias:
            return output, bias
        return output + bias, None


class TransformerEngineColumnParallelLinear(_TransformerEngineLinear, TEColumnParallelLinear):
    """Column-parallel linear layer with TE's block-scaled products."""

    def __init__(
        self, *args: Any, formats: LinearFormats, bias: bool, skip_bias_add: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, bias=bias, skip_bias_add=bias, **kwargs)
        self.declared, self.caller_adds_bias = formats, skip_bias_add


class TransformerEngineRowParallelLinear(_TransformerEngineLinear, TERowParallelLinear):
    """Row-parallel linear layer with TE's block-scaled products."""

    def __init__(
        self, *args: Any, formats: LinearFormats, bias: bool, skip_bias_add: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, bias=bias, skip_bias_add=bias, **kwargs)
        self.declared, self.caller_adds_bias = formats, skip_bias_add
