"""What one model family adds to the common description.

A `Family` is data: the architecture's name, what Hugging Face assumes for keys that a `config.json`
leaves out, the two structural switches that differ between the families, and how a family with
experts spells them. It holds no weights and builds nothing; each family's own file fills one in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How a mixture-of-experts family spells what all of them have."""

    block: str
    """Module of a layer that holds the experts, and their router under the name `gate`."""
    projections: tuple[str, str, str]
    """An expert's gate, up and down projections."""
    num_experts_key: str
    """Key of `config.json` for the number of experts."""
    ffn_key: str
    """Key of `config.json` for the width of an expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One supported Hugging Face architecture."""

    name: str
    """Short name, equal to Hugging Face's `model_type`."""
    architecture: str
    """Class name in `architectures` of `config.json`."""
    qkv_bias: bool
    """True when q, k and v projections always have a bias."""
    qk_norm: bool
    """True when query and key heads are normalised."""
    defaults: Mapping[str, Any]
    """Values that transformers assumes for keys absent from `config.json`.

    `num_key_value_heads` None means the number of query heads, `head_dim` None means
    hidden_size / num_attention_heads.
    """
    experts: ExpertNames | None = None
    """Spelling of the experts; None for a dense family."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Raises ValueError for a feature that only this family has and that is not implemented.

    Receives the config with `defaults` filled in.
    """


def check_uniform_attention(config: Mapping[str, Any]) -> None:
    """Refuse Qwen's optional sliding-window layers.

    Args:
        config: Hugging Face config with the family's defaults filled in.

    Raises:
        ValueError: `use_sliding_window` is on and at least one layer slides.
    """
    if (
        config["use_sliding_window"]
        and config["sliding_window"] is not None
        and config["max_window_layers"] < config["num_hidden_layers"]
    ):
        raise ValueError(
            f"use_sliding_window={config['use_sliding_window']!r} with "
            f"max_window_layers={config['max_window_layers']!r} asks for sliding-window attention, "
            "which is not implemented: set use_sliding_window to false in config.json if you "
            "stay within the window."
        )


def check_window(config: Mapping[str, Any]) -> None:
    """Refuse a sliding window that is shorter than the context.

    Args:
        config: Hugging Face config with the family's defaults filled in.

    Raises:
        ValueError: `sliding_window` is set and below `max_position_embeddings`.
    """
    window, longest = config["sliding_window"], config["max_position_embeddings"]
    if window is not None and window < longest:
        raise ValueError(
            f"sliding_window={window!r} is shorter than max_position_embeddings={longest}, and "
            "sliding-window attention is not implemented: set sliding_window to null in "
            f"config.json if no sequence is longer than {window} tokens."
        )
