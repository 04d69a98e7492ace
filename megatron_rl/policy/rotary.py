"""Rotary frequencies of a model, computed as Hugging Face and vLLM compute them.

Angles are ``position * inv_freq`` with ``inv_freq_i = theta^(-2i/D)``, all FP32. Llama 3.1
stretches the low frequencies (arXiv 2407.21783; ``_compute_llama3_parameters`` in transformers);
linear scaling divides all.
"""

import math

import torch

from megatron_rl.models import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Inverse frequencies ``[head_dim / 2]`` in float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        return _llama3(inv_freq, rope)
    assert rope.type == "default", rope.type
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > length / low, inv_freq / rope.factor, inv_freq)
    smooth = (length / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_medium = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(is_medium, smoothed, scaled)
