"""Built-in verifiers, with the signature of ``compute_score``; libraries load when used."""

import ast
import functools
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

IN_PROCESS = ("exact_match",)
"""Verifiers that are plain string comparison: they cannot hang, so they need no worker."""


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """1 when answer and ground truth are the same text up to white space, or the same number.

    Raises:
        ValueError: The ground truth is empty, which would reward an empty answer.
    """
    answer, truth = " ".join(solution_str.split()), " ".join(ground_truth.split())
    if not truth:
        raise ValueError("the row has no single right answer; use another reward.function")
    if answer == truth:
        return 1.0
    try:
        return float(Decimal(answer) == Decimal(truth))
    except InvalidOperation:
        return 0.0


def math(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 when both parse to the same mathematical object (the math-verify library).

    Raises:
        ValueError: The ground truth is no mathematics.
    """
    from math_verify import parse, verify

    # The library's own limit uses signals; the worker's limit replaces it.
    truth = parse(f"${ground_truth}$", parsing_timeout=None) or parse(
        ground_truth, parsing_timeout=None
    )
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} cannot be parsed as mathematics")
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(truth, answer, timeout_seconds=None))


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """The task's own scorer, which gives partial credit in some tasks.

    It needs of ``extra_info``: ``task``; ``entry`` (the entry as a Python literal, which generated
    rows carry) or ``metadata``; and ``task_config`` where the scorer depends on it.

    Raises:
        ValueError: The row does not have them.
    """
    info = extra_info or {}
    if "task" not in info or not ("entry" in info or "metadata" in info):
        raise ValueError("the row is not of a reasoning_gym source: it has no task and metadata")
    if "entry" in info:
        entry = ast.literal_eval(info["entry"])
    else:
        entry = {
            "question": info.get("question", ""),
            "answer": ground_truth,
            "metadata": info["metadata"],
        }
    scorer = _task_scorer(info["task"], json.dumps(info.get("task_config") or {}, sort_keys=True))
    score = float(scorer(solution_str, entry))
    return {"score": score, "acc": float(score >= 1.0)}


@functools.lru_cache(maxsize=64)
def _task_scorer(task: str, options: str) -> Callable[[str, Any], float]:
    """The scorer of a task; ``options`` is its configuration as JSON."""
    import reasoning_gym as gym

    scorer: Callable[[str, Any], float] = gym.create_dataset(
        task, **json.loads(options)
    ).score_answer
    return scorer


def verifier_of_row(extra_info: Mapping[str, Any] | None) -> str:
    """The verifier that ``auto`` takes: the row's ``extra_info.verifier``, else ``exact_match``.

    Rows of a ``reasoning_gym`` source name ``reasoning_gym`` where the task has a scorer of its own
    and ``exact_match`` elsewhere; rows of a file with ``ability: math`` name ``math``.
    """
    return str((extra_info or {}).get("verifier", "exact_match"))


def auto(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """Whatever :func:`verifier_of_row` chooses.

    Raises:
        ValueError: The row names no built-in verifier.
    """
    name = verifier_of_row(extra_info)
    if name not in _VERIFIERS or name == "auto":
        raise ValueError(f"extra_info.verifier={name!r} is no built-in verifier")
    return _VERIFIERS[name](data_source, solution_str, ground_truth, extra_info)


_VERIFIERS: dict[str, Callable[..., Any]] = {
    "auto": auto,
    "exact_match": exact_match,
    "math": math,
    "reasoning_gym": reasoning_gym,
}

BUILT_IN = tuple(_VERIFIERS)


def built_in(name: str) -> Callable[..., Any]:
    """A built-in verifier by name."""
    return _VERIFIERS[name]


def prepare(name: str) -> None:
    """Loads what a built-in verifier uses, so that no scoring call pays for it with its limit."""
    if name in ("auto", "math"):
        # It warns at every call that its own time limit is off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        math("", "1", "1")
    if name in ("auto", "reasoning_gym"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a dependency's source has invalid comparisons
            importlib.import_module("reasoning_gym")
