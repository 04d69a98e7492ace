"""Mixtral (`MixtralForCausalLM`): a Mistral with experts in every layer, spelled its own way."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_rl.models.family import ExpertNames, Family, check_window


def _check(config: Mapping[str, Any]) -> None:
    check_window(config)
    if config["router_jitter_noise"]:
        raise ValueError(
            f"router_jitter_noise={config['router_jitter_noise']!r} in the model config is not "
            "implemented; it must be 0, or absent."
        )


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    qkv_bias=False,
    qk_norm=False,
    experts=ExpertNames(
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        num_experts_key="num_local_experts",
        ffn_key="intermediate_size",
    ),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "head_dim": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": None,
            "default_rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
            # It has no such key: a token's weights are always normalised.
            "norm_topk_prob": True,
        }
    ),
    check=_check,
)
