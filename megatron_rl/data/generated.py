"""Generated prompts: any ``reasoning-gym`` task by name, with a template and solved shots.

Rows depend on the task's options and seed alone. Shots come from the same generator with a seed of
their own, so a shot is never the question it precedes by construction of the data set.
"""

import dataclasses
import difflib
import json
import string
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_rl.config import DataSourceConfig
from megatron_rl.data.types import PromptRow

SHOT_SEED_OFFSET = 1_000_003
"""Keeps the stream of shots apart from every data set's own seed."""


def generate_rows(source: DataSourceConfig) -> list[PromptRow]:
    """Generates the rows of a ``reasoning_gym`` source.

    Raises:
        ValueError: The task, an option, or a field of a template does not exist.
    """
    assert source.task is not None
    entries = _entries(source, source.seed, source.size)
    shots = _entries(source, source.seed + SHOT_SEED_OFFSET, max(4 * source.num_shots, 1))
    template = source.prompt_template or "{question}"
    if source.num_shots and "{shots}" not in template:
        template = "{shots}" + template
    rows = []
    for index, entry in enumerate(entries):
        fields = _fields(entry)
        text = "".join(
            _format(source, "shot_template", source.shot_template, _fields(shot))
            for shot in _choose_shots(shots, entry, index, source.num_shots)
        )
        prompt = _format(source, "prompt_template", template, fields | {"shots": text})
        rows.append(
            PromptRow(
                index=index,
                data_source=source.name,
                prompt=prompt,
                ground_truth=str(entry["answer"]),
                extra_info={
                    "question": str(entry["question"]),
                    "task": source.task,
                    "metadata": json.loads(json.dumps(entry["metadata"], default=str)),
                },
            )
        )
    return rows


def _choose_shots(
    shots: list[dict[str, Any]], entry: dict[str, Any], index: int, count: int
) -> list[dict[str, Any]]:
    """``count`` solved examples for row ``index``, none of which is its own question."""
    chosen: list[dict[str, Any]] = []
    questions = {entry["question"]}
    for step in range(len(shots)):
        candidate = shots[(index * count + step) % len(shots)]
        if len(chosen) < count and candidate["question"] not in questions:
            chosen.append(candidate)
            questions.add(candidate["question"])
    return chosen


def _entries(source: DataSourceConfig, seed: int, size: int) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dependency's source has invalid comparisons
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    if source.task not in DATASETS:
        nearest = difflib.get_close_matches(str(source.task), DATASETS, n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see reasoning-gym's gallery"
        raise ValueError(
            f"data source {source.name!r}: no reasoning-gym task {source.task!r}; {hint}"
        )
    known = {field.name for field in dataclasses.fields(DATASETS[source.task][1])}
    for option in source.task_config:
        if option not in known or option in ("seed", "size"):
            nearest = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {sorted(known)}"
            raise ValueError(
                f"data source {source.name!r}: task {source.task!r} has no option {option!r} "
                f"here; {hint}"
            )
    try:
        dataset = reasoning_gym.create_dataset(
            source.task, size=size, seed=seed, **source.task_config
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"data source {source.name!r}: task {source.task!r} refuses {source.task_config}: "
            f"{error}"
        ) from error
    return [dataset[index] for index in range(size)]


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a template may name: question, answer, metadata, and metadata's own plain values."""
    metadata = dict(entry["metadata"])
    plain = {k: v for k, v in metadata.items() if isinstance(v, str | int | float)}
    return plain | {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}


def _format(source: DataSourceConfig, name: str, template: str, fields: dict[str, Any]) -> str:
    try:
        return string.Formatter().vformat(template, (), fields)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"data source {source.name!r}: {name}={template!r} names {error}, and the task offers "
            f"{', '.join(sorted(fields))}"
        ) from error
