"""Rotary frequencies have the bits of transformers'."""

import pytest
import torch

from megatron_rl.models import RopeSpec
from megatron_rl.policy.rotary import inverse_frequencies

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES = [
    ("default", {}),
    ("linear", {"factor": 4.0}),
    ("llama3", {"factor": 8.0, **LLAMA3}),
    ("llama3", {"factor": 32.0, **LLAMA3, "original_max_position_embeddings": 256}),
]


def transformers_rotary(head_dim, theta, kind, options):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **options},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize(("kind", "options"), ROPES)
def test_frequencies_and_angles_equal_transformers(kind, options, theta, head_dim):
    reference = transformers_rotary(head_dim, theta, kind, options)
    ours = inverse_frequencies(RopeSpec(theta=theta, type=kind, **options), head_dim)
    assert ours.dtype == torch.float32 and torch.equal(ours, reference.inv_freq)
    positions = torch.tensor([[0, 1, 17, 1023, 100_000]])
    cos, sin = reference(torch.zeros(1, 5, head_dim), positions)
    angles = positions[0].float()[:, None] * ours
    angles = torch.cat((angles, angles), dim=-1)
    torch.testing.assert_close(angles.cos(), cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angles.sin(), sin[0], rtol=0, atol=1e-6)


def test_scaling_changes_what_it_says():
    plain = inverse_frequencies(RopeSpec(theta=500000.0), 128)
    linear = inverse_frequencies(RopeSpec(theta=500000.0, type="linear", factor=4.0), 128)
    llama3 = inverse_frequencies(RopeSpec(theta=500000.0, type="llama3", factor=8.0, **LLAMA3), 128)
    assert torch.equal(linear, plain / 4)
    assert torch.equal(llama3[:20], plain[:20]) and torch.equal(llama3[-16:], plain[-16:] / 8)
    between = llama3 / plain
    assert (between.diff() <= 1e-7).all() and ((between > 0.13) & (between < 0.99)).any()
