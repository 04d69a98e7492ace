"""Shape and dtype checks that the functions of this package share.

They read shapes and dtypes only, never values, so they cost no device synchronisation.
"""

import torch
from torch import Tensor


def response_mask(mask: Tensor, **same_shape: Tensor) -> Tensor:
    """Return `mask` as bool after checking it against the tensors it belongs to.

    Args:
        mask: [B, S] bool or 0/1, the response tokens.
        **same_shape: tensors that must be [B, S] as well, by the name used in the error.

    Raises:
        ValueError: `mask` is not two-dimensional, or a tensor has another shape.
    """
    if mask.dim() != 2:
        raise ValueError(
            f"mask has shape {list(mask.shape)}, expected [B, S]; pad responses to one length."
        )
    for name, tensor in same_shape.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, expected the mask's {list(mask.shape)}; "
                "pass response positions only, padded to one length."
            )
    return mask.bool()


def full_precision(**tensors: Tensor) -> None:
    """Refuse log-probs in 16 bits or fewer.

    A BF16 log-prob near -1 has a step of 4e-3 to 8e-3, larger than the train/rollout mismatch that
    this package is asked to correct.

    Raises:
        ValueError: a tensor is neither float32 nor float64.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {tensor.dtype}, expected float32; compute log-softmax in float32."
            )
