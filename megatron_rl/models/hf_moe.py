"""The mixture-of-experts part of a Hugging Face config.

A layer has experts unless `mlp_only_layers` names it or `decoder_sparse_step` passes it over, and
then it is dense with `intermediate_size`; families without these keys have experts in every layer.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.family import ExpertNames
from megatron_rl.models.hf_values import positive_int
from megatron_rl.models.spec import MoESpec


def moe_spec(config: Mapping[str, Any], names: ExpertNames) -> MoESpec:
    """Read the experts of a Hugging Face config.

    Args:
        config: Content of `config.json` with the family's defaults filled in.
        names: How the family spells them.

    Returns:
        The experts.

    Raises:
        ValueError: A number is missing or malformed, a token has more experts than there are, or
            no layer has any.
    """
    num_experts = positive_int(config, names.num_experts_key)
    per_token = positive_int(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(
            f"num_experts_per_tok={per_token} in the model config is more than "
            f"{names.num_experts_key}={num_experts}."
        )
    num_layers = positive_int(config, "num_hidden_layers")
    step = positive_int(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = set(config.get("mlp_only_layers") or ())
    layers = {i for i in range(num_layers) if (i + 1) % step == 0} - dense
    if not layers:
        raise ValueError(
            f"decoder_sparse_step={step} and mlp_only_layers={sorted(dense)} in the model config "
            f"leave none of the {num_layers} layers with experts; a dense model needs the dense "
            "architecture."
        )
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        ffn_hidden_size=positive_int(config, names.ffn_key),
        normalise_weights=bool(config["norm_topk_prob"]),
        layers=frozenset(layers),
    )
