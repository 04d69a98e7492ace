"""Mistral 7B and its relatives (`MistralForCausalLM`), where attention is full.

Structurally a Llama. Version 0.1 attends within a sliding window, which is not implemented and
refused; from version 0.2 on the window is null. A `config.json` without the key means a window of
4096 tokens: that is what transformers assumes.
"""

from types import MappingProxyType

from megatron_rl.models.family import Family, check_window

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    qkv_bias=False,
    qk_norm=False,
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "head_dim": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": 4096,
        }
    ),
    check=check_window,
)
