"""RMSNorm with the rounding of Hugging Face and vLLM.

    y = round(x * rsqrt(mean(x^2) + eps)) * weight

The statistics and the product are FP32; the result is rounded to the flow's dtype *before* the
multiplication by the weight. ``torch.nn.functional.rms_norm`` rounds once, at the end, and so
differs in up to a quarter of the elements in BF16; it is not used.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension; chosen by module spec wherever a layer needs a norm."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron all-reduces the gradient of such a weight over TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises ``x [..., hidden_size]``, any float dtype, to the same dtype."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps the input and one FP32 number a row, instead of autograd's three FP32 copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # noqa: D102
        x32 = x.float()
        rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad32 = grad.float()
        grad_weight = (grad32 * normed.to(x.dtype).float()).flatten(0, -2).sum(0)
        grad_normed = grad32 * weight.float()
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = rstd * (grad_normed - normed * projection)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
