"""A prompt as a row of a data set, and the same as tokens."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One row of a data set."""

    index: int
    """Place in its data source."""
    data_source: str
    """Name of the data source."""
    prompt: str | tuple[dict[str, str], ...]
    """Text, or chat messages with ``role`` and ``content``."""
    ground_truth: str
    """What the verifier compares with."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Anything else the verifier reads; JSON-able. ``question`` is the bare question."""


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A row with its prompt's tokens."""

    row: PromptRow
    token_ids: tuple[int, ...]
    text: str
    """The prompt as text, as the model sees it."""
