"""GGUF metadata as the content of a Hugging Face `config.json`.

Only metadata that changes the computation is read. What the framework does not implement is an
error here, or in `megatron_rl.models.model_spec`, which judges the config that is made here.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

_HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REQUIRED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
# Features that would change the computation, and the values that mean they are off.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (None, 0),
    "attention.sliding_window": (None, 0),
    "attention.scale": (None,),
    "logit_scale": (None, 1.0),
    "residual_scale": (None, 1.0),
    "embedding_scale": (None, 1.0),
    "attention.causal": (None, True),
}


def hf_config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str]
) -> dict[str, Any]:
    """Make a `config.json`.

    Args:
        metadata: All key-value pairs of the file; `general.architecture` is llama, qwen2 or qwen3.
        tensor_names: Names of all tensors of the file; no output head means a tied one.

    Returns:
        The config, in the spelling that transformers 4 and 5 both read.

    Raises:
        ValueError: A key is missing, or the file uses a feature that is not supported.
    """
    architecture = metadata["general.architecture"]

    def read(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    missing = [f"{architecture}.{key}" for key in _REQUIRED.values() if read(key) is None]
    if missing:
        raise ValueError(f"The GGUF file lacks {', '.join(missing)}: it is no complete model.")
    for key, off in _OFF.items():
        if read(key) not in off:
            raise ValueError(
                f"The GGUF file has {architecture}.{key}={read(key)!r}, which is not supported."
            )
    if "rope_freqs.weight" in tensor_names:
        raise ValueError(
            "The GGUF file has rope_freqs.weight: its long-context frequencies cannot be turned "
            "back into a config; import the original checkpoint instead."
        )
    config = {hf_key: read(key) for hf_key, key in _REQUIRED.items()}
    heads, rotated = config["num_attention_heads"], read("rope.dimension_count")
    head_dim = read("attention.key_length") or config["hidden_size"] // heads
    if rotated not in (None, head_dim):
        raise ValueError(
            f"The GGUF file rotates {rotated} of {head_dim} dimensions of a head, which is not "
            "supported."
        )
    return config | {
        "architectures": [_HF_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "num_key_value_heads": read("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "vocab_size": read("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": _shortest(config["rms_norm_eps"]),
        "rope_theta": _shortest(read("rope.freq_base") or 10000.0),
        "rope_scaling": _rope_scaling(read("rope.scaling.type"), read("rope.scaling.factor")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(kind: str | None, factor: float | None) -> dict[str, Any] | None:
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, "factor": factor}


def _eos(metadata: Mapping[str, Any]) -> int | list[int] | None:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = list(dict.fromkeys(metadata[key] for key in keys if metadata.get(key) is not None))
    return ids if len(ids) > 1 else ids[0] if ids else None


def _shortest(value: float) -> float:
    """GGUF stores float32; give back the decimal that was rounded to it, 1e-5 say."""
    return float(str(np.float32(value)))
