"""The tokenizer inside a GGUF file, as Hugging Face tokenizer files.

transformers rebuilds vocabulary, merges and special tokens. It does not know every rule by which
text is split before the merges apply: for an unknown one it silently falls back to GPT-2's, and
the same text then gives other tokens than the model was trained on. Such files are refused; the
rule of SmolLM2 is added here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from checkpoints_tools.hf import read_json, write_json

# Splitting rules (`tokenizer.ggml.pre`) that transformers applies by itself.
_KNOWN_TO_TRANSFORMERS = ("llama3", "llama-v3", "llama-bpe", "tekken", "qwen2", "gpt-2")
# What transformers notes about how the tokenizer was loaded.
_LOADING_NOTES = ("is_local", "local_files_only", "name_or_path")


def write_tokenizer(
    gguf_path: Path, directory: Path, config: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template.

    Args:
        gguf_path: The GGUF file.
        directory: Where to write.
        config: The `config.json` made from the file.
        metadata: All key-value pairs of the file.

    Raises:
        ValueError: The splitting rule is unknown, or the tokenizer does not fit the config.
    """
    # Costs seconds to import; the rest of the command line does not need it.
    from transformers import AutoTokenizer

    rule = metadata.get("tokenizer.ggml.pre")
    is_bpe = metadata.get("tokenizer.ggml.model") == "gpt2"
    if is_bpe and rule not in (*_KNOWN_TO_TRANSFORMERS, "smollm"):
        raise ValueError(
            f"The GGUF tokenizer splits text by the rule tokenizer.ggml.pre={rule!r}, which is not "
            "supported; import the original checkpoint instead."
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    if is_bpe and rule == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.model_max_length = config["max_position_embeddings"]
    if len(tokenizer) > config["vocab_size"]:
        raise ValueError(
            f"The GGUF tokenizer has {len(tokenizer)} tokens, more than vocab_size="
            f"{config['vocab_size']}."
        )
    tokenizer.save_pretrained(directory)
    settings = read_json(directory / "tokenizer_config.json")
    kept = {key: value for key, value in settings.items() if key not in _LOADING_NOTES}
    # The generic class, under the name that every version of transformers knows.
    write_json(
        directory / "tokenizer_config.json", kept | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )
