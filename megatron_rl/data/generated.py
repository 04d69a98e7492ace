"""Generated prompts: any ``reasoning-gym`` task by name, with a template and solved shots.

Rows depend on the task's options and seed alone, in every process (see ``generator``). Shots come
from the same task with a seed of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config import DataSourceConfig
from megatron_rl.data.plain import plain
from megatron_rl.data.templates import Fields, render_prompts, template_fields
from megatron_rl.data.types import PromptRow

Entry = Mapping[str, Any]

SHOT_SEED_OFFSET = 1_000_003
"""Keeps the stream of shots apart from every data set's own: entry ``i`` is seeded ``seed + i``."""


def generate_rows(sources: Sequence[DataSourceConfig]) -> list[list[PromptRow]]:
    """Generates the rows of ``reasoning_gym`` sources; one process serves them all.

    The ground truth is the entry's answer, empty where the task has no single one.
    ``extra_info`` keeps ``question``, ``task``, ``task_config`` and ``metadata``; ``entry``, the
    whole entry for the task's scorer; and ``verifier``, which is ``reasoning_gym`` for tasks with a
    scorer of their own and ``exact_match`` for the others.

    Raises:
        ValueError: A task, an option, or a field of a template does not exist.
    """
    if not sources:
        return []
    return [
        rows_from_entries(source, *lists)
        for source, lists in zip(sources, _generate(sources), strict=True)
    ]


def rows_from_entries(
    source: DataSourceConfig, entries: Sequence[Entry], solved: Sequence[Entry]
) -> list[PromptRow]:
    """Rows of a source, of its entries and those to show solved.

    Raises:
        ValueError: A template does not fit.
    """
    prompts = render_prompts(source, list(map(_fields, entries)), list(map(_fields, solved)))
    return [
        PromptRow(
            index=index,
            data_source=source.name,
            prompt=prompt,
            ground_truth=entry["answer"] or "",
            extra_info={
                "question": entry["question"],
                "task": source.task,
                "task_config": plain(source.task_config),
                "metadata": entry["metadata"],
                "entry": entry["literal"],
                "verifier": entry["verifier"],
            },
        )
        for index, (entry, prompt) in enumerate(zip(entries, prompts, strict=True))
    ]


def _fields(entry: Entry) -> Fields:
    return template_fields(entry["question"], entry["answer"], entry["metadata"])


def generator_request(source: DataSourceConfig) -> dict[str, Any]:
    """What ``generator.generate`` is asked for: the source's entries, and those to show solved."""
    # Some tasks refuse to generate nothing.
    solved = (source.seed + SHOT_SEED_OFFSET, max(4 * source.num_shots, 1))
    return {
        "task": source.task,
        "options": plain(source.task_config),
        "parts": [(source.seed, source.size), solved],
    }


def _generate(sources: Sequence[DataSourceConfig]) -> list[list[list[Entry]]]:
    requests = [{"name": source.name, **generator_request(source)} for source in sources]
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_rl.data.generator"],
        input=json.dumps(requests),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if finished.returncode:
        raise ValueError(
            "reasoning-gym failed to generate one of "
            f"{', '.join(repr(source.task) for source in sources)} (its error is above); "
            "change data.*.task_config"
        )
    reply = json.loads(finished.stdout)
    if "error" in reply:
        raise ValueError(reply["error"])
    results: list[list[list[Entry]]] = reply["results"]
    return results
