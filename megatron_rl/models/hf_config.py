"""From a Hugging Face config to a `ModelSpec`.

Reads `config.json` as a mapping, or any object with `to_dict()`, in the spelling of transformers 4
and of transformers 5. What a config asks for and the framework does not implement is an error that
names the key: a model that is silently built without one of its features trains to nonsense.
Quantisation, tokenizer and generation settings are not read here, except for token ids.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_rl.models.hf_moe import moe_spec
from megatron_rl.models.hf_rope import rope_spec
from megatron_rl.models.hf_values import positive_float, positive_int
from megatron_rl.models.registry import family_of
from megatron_rl.models.spec import ModelSpec


class HasToDict(Protocol):
    """A config object of transformers, without importing transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        ...


HFConfig = Mapping[str, Any] | HasToDict

# Keys that change the computation when they have any value but these. Absent counts as allowed.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "no_rope_layers": (None,),
    "is_encoder_decoder": (False, None),
}


def model_spec(hf_config: HFConfig, *, generation_config: HFConfig | None = None) -> ModelSpec:
    """Describe the model of a Hugging Face config.

    Args:
        hf_config: Content of `config.json`, or a transformers config object.
        generation_config: Content of `generation_config.json`; adds its EOS ids.

    Returns:
        The neutral description, with all defaults resolved as transformers resolves them.

    Raises:
        ValueError: The architecture or one of its settings is missing, malformed or not
            implemented; the message names key and value.
    """
    raw = as_mapping(hf_config)
    family = family_of(raw)
    config = {**family.defaults, **raw}
    _check_implemented(config)
    if family.check is not None:
        family.check(config)

    hidden_size = positive_int(config, "hidden_size")
    num_heads = positive_int(config, "num_attention_heads")
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = num_heads
    num_groups = positive_int(config, "num_key_value_heads")
    if num_heads % num_groups:
        raise ValueError(
            f"num_attention_heads={num_heads} in the model config is not a multiple of "
            f"num_key_value_heads={num_groups}."
        )
    if config["head_dim"] is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads} "
                "and the model config gives no head_dim."
            )
        config["head_dim"] = hidden_size // num_heads
    head_dim = positive_int(config, "head_dim")
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} in the model config is odd: rotary embedding needs an even one."
        )
    vocab_size = positive_int(config, "vocab_size")
    eos = eos_token_ids(raw, generation_config)
    pad = config.get("pad_token_id")
    bos = config["bos_token_id"]
    for key, token_id in [("bos_token_id", bos)] + [("eos_token_id", i) for i in eos]:
        if token_id is not None and not _is_token_id(token_id, vocab_size):
            raise ValueError(f"{key}={token_id!r} is not a token id below vocab_size={vocab_size}.")
    return ModelSpec(
        family=family.name,
        architecture=family.architecture,
        num_layers=positive_int(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_groups,
        head_dim=head_dim,
        ffn_hidden_size=positive_int(config, "intermediate_size"),
        vocab_size=vocab_size,
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        norm_epsilon=positive_float(config, "rms_norm_eps"),
        rope=rope_spec(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        moe=None if family.experts is None else moe_spec(config, family.experts),
        bos_token_id=bos,
        # Some checkpoints pad with an id outside the vocabulary (-1); padding is never embedded.
        pad_token_id=pad if _is_token_id(pad, vocab_size) else None,
        eos_token_ids=eos,
    )


def eos_token_ids(
    hf_config: HFConfig, generation_config: HFConfig | None = None
) -> tuple[int, ...]:
    """All token ids that end a sequence.

    The two files often disagree: `config.json` of a chat model may name the end of text only, and
    `generation_config.json` the end of turn too. A rollout stops at any of them.

    Args:
        hf_config: Content of `config.json`, or a transformers config object.
        generation_config: Content of `generation_config.json`, if there is one.

    Returns:
        Ids of `config.json` first, then those that only `generation_config.json` names.

    Raises:
        ValueError: A value is neither an integer, a list of integers nor null, or the
            architecture is not supported.
    """
    raw = as_mapping(hf_config)
    sources = [{**family_of(raw).defaults, **raw}]
    if generation_config is not None:
        sources.append(dict(as_mapping(generation_config)))
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if not all(type(i) is int for i in ids):
            raise ValueError(
                f"eos_token_id={value!r} must be an integer, a list of integers or null."
            )
        found.extend(i for i in ids if i not in found)
    return tuple(found)


def as_mapping(hf_config: HFConfig) -> Mapping[str, Any]:
    """View a config, given as a mapping or an object with `to_dict()`, as a mapping.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(hf_config, Mapping):
        return hf_config
    if hasattr(hf_config, "to_dict"):
        return hf_config.to_dict()
    raise ValueError(
        f"A model config must be a mapping or have to_dict(), not {type(hf_config).__name__}."
    )


def _check_implemented(config: Mapping[str, Any]) -> None:
    for key, allowed in _ALLOWED.items():
        if key in config and config[key] not in allowed:
            raise ValueError(
                f"{key}={config[key]!r} in the model config is not implemented; it must be "
                f"{' or '.join(repr(value) for value in allowed)}, or absent."
            )
    other = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if other:
        raise ValueError(
            f"layer_types in the model config contains {', '.join(other)}; only full_attention is "
            "implemented."
        )


def _is_token_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size
