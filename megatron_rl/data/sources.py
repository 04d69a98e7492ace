"""Data sources by configuration: files and generated tasks, as rows."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import DataSourceConfig
from megatron_rl.data.generated import generate_rows
from megatron_rl.data.rows import read_rows
from megatron_rl.data.types import PromptRow

logger = logging.getLogger(__name__)


def load_rows(source: DataSourceConfig) -> list[PromptRow]:
    """The rows of one data source.

    Raises:
        ValueError: The source is missing, empty, or a row of it is unreadable.
    """
    if source.kind == "reasoning_gym":
        return generate_rows(source)
    assert source.path is not None
    return read_rows(Path(source.path), source.name, source.size)


def drop_overlap(train: Sequence[PromptRow], val: Sequence[PromptRow]) -> list[PromptRow]:
    """Training rows whose question is not among the held-out ones.

    Small generated tasks repeat themselves; a held-out question must not be trained on.

    Raises:
        ValueError: No training row is left.
    """
    held_out = {row.extra_info["question"] for row in val}
    kept = [row for row in train if row.extra_info["question"] not in held_out]
    if len(kept) < len(train):
        logger.info("dropped %d training rows that are held out", len(train) - len(kept))
    if not kept:
        raise ValueError("every training question is in the held-out set; use other data.val rows")
    return kept
