"""Llama 2 and 3, SmolLM2, TinyLlama, and everything else that ships as `LlamaForCausalLM`.

The plain member of the group: no biases, no q/k norm, full attention. `attention_bias` and
`mlp_bias` are refused: they also put a bias on the output projections, which the parameter map
does not carry.
"""

from types import MappingProxyType

from megatron_rl.models.family import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    qkv_bias=False,
    qk_norm=False,
    defaults=MappingProxyType(
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    ),
)
