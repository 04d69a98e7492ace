"""The process that generates entries of a ``reasoning-gym`` task.

Entries of several tasks depend on Python's hash seed (they iterate over sets) or on the global
random generators, so two ranks, or a run and its continuation, would see different data. Here both
are fixed: the parent starts ``python -m megatron_rl.data.generator`` with ``PYTHONHASHSEED``, sends
its requests as one JSON list, and reads one JSON answer. Knows nothing of prompts and templates.
"""

import ast
import contextlib
import dataclasses
import difflib
import json
import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rl.data.plain import plain


def generate(
    task: str, options: Mapping[str, Any], parts: list[tuple[int, int]]
) -> list[list[dict[str, Any]]]:
    """Entries of a task, JSON-able.

    Args:
        task: Name of the task.
        options: Its options, without seed and size.
        parts: Seed and number of entries of each list to generate.

    Returns:
        For each part its entries, with ``question`` (text), ``answer`` (text or None), ``metadata``
        (JSON-able), ``literal`` (the whole entry as a Python literal, since the task's scorer tells
        tuples from lists) and ``verifier`` (the built-in verifier that fits the task).

    Raises:
        ValueError: The task or an option does not exist, or the task refuses its options.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dependency's source has invalid comparisons
        import reasoning_gym
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    if task not in DATASETS:
        nearest = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see reasoning-gym's gallery"
        raise ValueError(f"no reasoning-gym task {task!r}; {hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for option in options:
        if option not in known:
            nearest = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {sorted(known)}"
            raise ValueError(f"task {task!r} has no option {option!r} here; {hint}")
    lists = []
    for seed, size in parts:
        try:
            dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"task {task!r} refuses {dict(options)}: {error}") from error
        # A task overrides the scorer when its answer is not the only right one.
        own_scorer = type(dataset).score_answer is not ProceduralDataset.score_answer
        verifier = "reasoning_gym" if own_scorer else "exact_match"
        lists.append(
            [_entry(dataset, seed, index) | {"verifier": verifier} for index in range(size)]
        )
    return lists


def _entry(dataset: Any, seed: int, index: int) -> dict[str, Any]:
    random.seed(f"{seed} {index}")
    np.random.seed(random.getrandbits(32))
    entry = dataset[index]
    answer = None if entry["answer"] is None else str(entry["answer"])
    whole = {"question": entry["question"], "answer": answer, "metadata": entry["metadata"]}
    return {
        "question": str(entry["question"]),
        "answer": answer,
        "metadata": plain(entry["metadata"]),
        "literal": repr(_literal(whole)),
    }


def _literal(value: Any) -> Any:
    """``value`` with everything that is no Python literal replaced by its plain form."""
    if isinstance(value, dict):
        return {_literal(key): _literal(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_literal(item) for item in value)
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return plain(value)
    return value


def main() -> None:
    """Answers the requests on standard input: the arguments of :func:`generate`, and a ``name``."""
    reply: dict[str, Any] = {"results": []}
    with contextlib.redirect_stdout(sys.stderr):
        for request in json.load(sys.stdin):
            name = request.pop("name")
            try:
                reply["results"].append(generate(**request))
            except ValueError as error:
                reply = {"error": f"data source {name!r}: {error}"}
                break
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
