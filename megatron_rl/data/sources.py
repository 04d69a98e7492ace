"""Data sources by configuration: files and generated tasks, as rows."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import DataSourceConfig
from megatron_rl.data.generated import generate_rows
from megatron_rl.data.rows import read_rows
from megatron_rl.data.templates import render_prompts, template_fields
from megatron_rl.data.types import PromptRow

logger = logging.getLogger(__name__)


def load_rows(source: DataSourceConfig) -> list[PromptRow]:
    """The rows of one data source; :func:`load_sources` is faster for several.

    Raises:
        ValueError: The source is missing, empty, or a row of it is unreadable.
    """
    return load_sources([source])[0]


def load_sources(sources: Sequence[DataSourceConfig]) -> list[list[PromptRow]]:
    """The rows of each data source.

    Raises:
        ValueError: A source is missing, empty, or a row of it is unreadable.
    """
    read = [_read(source) if source.kind == "file" else None for source in sources]
    generated = iter(generate_rows([s for s in sources if s.kind == "reasoning_gym"]))
    return [next(generated) if rows is None else rows for rows in read]


def _read(source: DataSourceConfig) -> list[PromptRow]:
    assert source.path is not None
    return _apply_template(source, read_rows(Path(source.path), source.name, source.size))


def _apply_template(source: DataSourceConfig, rows: list[PromptRow]) -> list[PromptRow]:
    """Rows with prompts made by the template; solved examples are the rows that follow."""
    if source.prompt_template is None and not source.num_shots:
        return rows
    fields = []
    for row in rows:
        if not isinstance(row.prompt, str):
            raise ValueError(
                f"{source.path}: prompt {row.index} is a list of chat messages, and "
                f"prompt_template and num_shots of data source {source.name!r} apply to text only; "
                "leave them out"
            )
        fields.append(template_fields(row.prompt, row.ground_truth, row.extra_info))
    prompts = render_prompts(source, fields, fields, offset=1)
    return [
        dataclasses.replace(row, prompt=prompt) for row, prompt in zip(rows, prompts, strict=True)
    ]


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
