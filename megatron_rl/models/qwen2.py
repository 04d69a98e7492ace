"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): a Llama with a bias on q, k and v."""

from types import MappingProxyType

from megatron_rl.models.family import Family, check_uniform_attention

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    qk_norm=False,
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 32,
            "head_dim": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        }
    ),
    check=check_uniform_attention,
)
