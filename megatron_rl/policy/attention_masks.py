"""Attention masks of prompt groups: who sees whom in a packed stream. Made once a shape."""

import functools

import torch


@functools.lru_cache(maxsize=256)
def tree_mask(prompt_length: int, response_lengths: tuple[int, ...]) -> torch.Tensor:
    """``[L, L]`` bool, true where the query (row) sees the key (column)."""
    lengths = torch.tensor((prompt_length, *response_lengths))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    same_branch = (owner[:, None] == owner[None, :]) | (owner[None, :] == 0)
    order = torch.arange(len(owner))
    return same_branch & (order[:, None] >= order[None, :])


@functools.lru_cache(maxsize=256)
def suffix_mask(prefix: int, length: int) -> torch.Tensor:
    """``[length, prefix + length]`` bool: the whole prefix, and causal after it."""
    return torch.ones(length, prefix + length, dtype=torch.bool).tril(diagonal=prefix)
