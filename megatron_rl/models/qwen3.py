"""Dense Qwen3 (`Qwen3ForCausalLM`): a Llama whose query and key heads are normalised.

The norm has one weight of size head_dim, shared by all heads of a layer, and precedes RoPE.
`head_dim` is independent of hidden_size / heads, 128 when `config.json` does not say.
"""

from types import MappingProxyType

from megatron_rl.models.family import Family, check_uniform_attention

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    qkv_bias=False,
    qk_norm=True,
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        }
    ),
    check=check_uniform_attention,
)
