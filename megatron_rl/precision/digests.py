"""Hashes of tensors' bytes, by which two engines compare operands without exchanging them."""

import hashlib

import torch


def digest(*tensors: torch.Tensor) -> str:
    """A short hash of the bytes of tensors, in order; shapes and dtypes count too."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        state.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        state.update(tensor.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def canonical(weight: torch.Tensor) -> torch.Tensor:
    """A weight as a product sees it: subnormals, which CPU products flush, and -0 become 0."""
    return weight.masked_fill(weight.abs() < torch.finfo(weight.dtype).tiny, 0.0)
