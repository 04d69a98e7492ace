"""What one model family adds to the common description.

A `Family` is data: the architecture's name, what Hugging Face assumes for keys that a `config.json`
leaves out, and the two structural switches that differ between the dense families. It holds no
weights and builds nothing; each family's own file fills one in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
