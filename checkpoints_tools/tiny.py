"""Tiny random models for tests and dry runs: a whole Hugging Face directory in milliseconds.

The weights mean nothing, but nothing is trivial either: norms are not one, biases not zero, and
grouped-query attention is on, so that a wrong layout, a dropped tensor or a swapped norm changes
the logits. The tokenizer is byte-level, hence lossless for any text, and has the special tokens
and chat template that a real chat model has.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from checkpoints_tools.atomic import new_directory
from checkpoints_tools.hf import fill_hf_directory, write_json
from megatron_rl.models import families, parameter_map
from megatron_rl.models.family import Family

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCAB_SIZE = len(_SPECIALS) + 256
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    path: Path | str,
    family: str = "llama",
    *,
    num_layers: int = 2,
    hidden_size: int = 128,
    num_attention_heads: int = 4,
    num_query_groups: int = 2,
    head_dim: int | None = None,
    ffn_hidden_size: int = 192,
    num_experts: int = 4,
    decoder_sparse_step: int = 1,
    vocab_size: int = BYTE_VOCAB_SIZE,
    max_position_embeddings: int = 1024,
    tie_word_embeddings: bool = False,
    std: float = 0.05,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: Literal["byte"] | None = "byte",
    overwrite: bool = False,
) -> Path:
    """Write a random model of a supported family as a Hugging Face directory.

    Args:
        path: Directory to make.
        family: Family name: `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` or `qwen3_moe`.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads.
        num_query_groups: Key/value heads.
        head_dim: Width of a head; hidden_size / num_attention_heads when None. vLLM's CPU
            attention needs 32 or more, and its Qwen2 takes only this default.
        ffn_hidden_size: Width of the feed-forward layer, or of an expert.
        num_experts: Experts of a layer, in the families that have any; a token uses two.
        decoder_sparse_step: `qwen3_moe` only: every how manyth layer has experts.
        vocab_size: Rows of the embedding; with the byte tokenizer at least `BYTE_VOCAB_SIZE`, and
            further ids are named `<|extra_N|>`.
        max_position_embeddings: Context length in tokens.
        tie_word_embeddings: Use the embedding as output head.
        std: Standard deviation of matrices and biases, and of norm weights around 1.
        seed: Seed of the weights; the same arguments give the same bytes.
        dtype: Dtype of all tensors.
        tokenizer: `"byte"`, or None to write none.
        overwrite: Replace a non-empty directory.

    Returns:
        The directory.

    Raises:
        ValueError: The family is unknown, a size is impossible, or `path` is taken.
    """
    if tokenizer is not None and vocab_size < BYTE_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for the byte tokenizer: it needs "
            f"{BYTE_VOCAB_SIZE}, or tokenizer=None."
        )
    described = _family(family)
    config: dict[str, Any] = {
        "architectures": [described.architecture],
        "model_type": family,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_query_groups,
        "head_dim": head_dim or hidden_size // num_attention_heads,
        "intermediate_size": ffn_hidden_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie_word_embeddings,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if family == "mistral":
        config["sliding_window"] = None
    if experts := described.experts:
        config |= {experts.num_experts_key: num_experts, "num_experts_per_tok": 2}
        config |= {experts.ffn_key: ffn_hidden_size}
    if family == "qwen3_moe":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": decoder_sparse_step}
    path = Path(path)
    with new_directory(path, overwrite=overwrite) as directory:
        weights = _weights(config, std=std, seed=seed, dtype=dtype)
        fill_hf_directory(directory, hf_config=config, tensors=weights)
        token_ids = {key: config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
        write_json(directory / "generation_config.json", token_ids)
        if tokenizer is not None:
            _write_tokenizer(directory, vocab_size, max_position_embeddings)
    return path


def _family(name: str) -> Family:
    known = {family.name: family for family in families()}
    if name not in known:
        raise ValueError(f"Unknown model family {name!r}; supported are {', '.join(known)}.")
    return known[name]


def _weights(
    config: dict[str, Any], *, std: float, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in parameter_map(config).hf_shapes.items():
        value = torch.randn(shape, generator=generator) * std
        yield name, (value + 1 if name.endswith("norm.weight") else value).to(dtype)


def _write_tokenizer(directory: Path, vocab_size: int, max_length_tokens: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = [f"<|extra_{i}|>" for i in range(vocab_size - BYTE_VOCAB_SIZE)]
    vocab = {token: i for i, token in enumerate([*_SPECIALS, *alphabet, *extra])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*_SPECIALS, *extra)]
    )
    backend.save(str(directory / "tokenizer.json"))
    pad, bos, eos = _SPECIALS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "model_max_length": max_length_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
