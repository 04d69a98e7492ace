"""Qwen3 with experts (`Qwen3MoeForCausalLM`), such as Qwen3-30B-A3B; attention is Qwen3's."""

from types import MappingProxyType

from megatron_rl.models.family import ExpertNames, Family, check_uniform_attention

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qkv_bias=False,
    qk_norm=True,
    experts=ExpertNames(
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        num_experts_key="num_experts",
        ffn_key="moe_intermediate_size",
    ),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 4,
            # Unlike dense Qwen3's: hidden_size / heads, though every published model says 128.
            "head_dim": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        }
    ),
    check=check_uniform_attention,
)
