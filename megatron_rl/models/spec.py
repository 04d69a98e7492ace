"""The neutral description of a decoder-only language model.

`ModelSpec` is what the rest of the framework knows about an architecture: plain numbers under
Megatron's names, with every default already resolved. It exists so that the policy, the precision
contract and the memory planner never read a Hugging Face config themselves. It does not describe
how the model is trained or split over devices.
"""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the whole head dimension, halves rotated (not interleaved)."""

    theta: float
    """Base of the inverse frequencies `theta ** (-2 i / head_dim)`."""
    type: RopeType = "default"
    """`linear` divides positions by `factor`; `llama3` divides low frequencies by `factor`."""
    factor: float = 1.0
    """Context extension factor of `linear` and `llama3`; 1.0 for `default`."""
    low_freq_factor: float | None = None
    """`llama3` only: wavelengths above original length / this are divided by `factor`."""
    high_freq_factor: float | None = None
    """`llama3` only: wavelengths below original length / this are left alone."""
    original_max_position_embeddings: int | None = None
    """`llama3` only: context length of pre-training, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """Layers where a router sends each token to a few of many feed-forward networks."""

    num_experts: int
    """Number of experts of a layer."""
    experts_per_token: int
    """Experts that a token is sent to (Megatron's `moe_router_topk`)."""
    ffn_hidden_size: int
    """Width of an expert's gate, and of its up projection."""
    normalise_weights: bool
    """True when the weights of a token's experts are made to sum to 1."""
    layers: frozenset[int]
    """Decoder layers that have experts; the others are dense."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A pre-norm, RMSNorm, RoPE, SwiGLU decoder with grouped-query attention.

    All attention is causal and full; no linear has a bias except the fused qkv when `qkv_bias`.
    """

    family: str
    """Short name of the family, such as `llama`; see `registry.families`."""
    architecture: str
    """Hugging Face architecture name, as in `config.json`."""
    num_layers: int
    """Number of decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Number of query heads."""
    num_query_groups: int
    """Number of key/value heads; each serves `q_per_group` query heads."""
    head_dim: int
    """Width of one head (Megatron's `kv_channels`); not always hidden_size / heads."""
    ffn_hidden_size: int
    """Width of the gate, and of the up projection, in layers without experts."""
    vocab_size: int
    """Rows of the embedding in the Hugging Face checkpoint, before Megatron's padding."""
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    norm_epsilon: float
    """Added to the mean square in each RMSNorm."""
    rope: RopeSpec
    """Rotary position embedding."""
    tie_word_embeddings: bool
    """True when the output head is the embedding matrix."""
    qkv_bias: bool
    """True when q, k and v projections have a bias (the output projection has none)."""
    qk_norm: bool
    """True when each query and key head goes through an RMSNorm before RoPE."""
    moe: MoESpec | None = None
    """Experts; None for a dense model."""
    bos_token_id: int | None
    """Id of the beginning-of-sequence token, None when the model has none."""
    pad_token_id: int | None
    """Id of the padding token, None when the model has none."""
    eos_token_ids: tuple[int, ...]
    """All ids that end a sequence; empty when the config names none."""

    def __post_init__(self) -> None:
        """Assert what every reader of a spec relies on."""
        assert self.num_attention_heads % self.num_query_groups == 0
        assert self.head_dim % 2 == 0
        assert not (self.qkv_bias and self.qk_norm), "no supported family has both"

    @property
    def q_per_group(self) -> int:
        """Query heads served by one key/value head."""
        return self.num_attention_heads // self.num_query_groups
