"""Built-in verifiers, with the signature of ``compute_score``; libraries load when used."""

from decimal import Decimal, InvalidOperation
from typing import Any

BUILT_IN = ("exact_match", "math", "reasoning_gym")
IN_PROCESS = ("exact_match",)
"""Verifiers that are plain string comparison: they cannot hang, so they need no worker."""


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """1 when answer and ground truth are the same text up to white space, or the same number."""
    answer, truth = " ".join(solution_str.split()), " ".join(str(ground_truth).split())
    if answer == truth:
        return 1.0
    try:
        return float(Decimal(answer) == Decimal(truth))
    except InvalidOperation:
        return 0.0


def math(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1 when both parse to the same mathematical object (the math-verify library)."""
    from math_verify import parse, verify

    # The library's own limit uses signals; the worker's limit replaces it.
    truth = parse(f"${ground_truth}$", parsing_timeout=None)
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(truth, answer, timeout_seconds=None))


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """The task's own scorer, which gives partial credit in some tasks."""
    import reasoning_gym as gym

    info = extra_info or {}
    if "task" not in info or "metadata" not in info:
        raise ValueError("the row is not of a reasoning_gym source: it has no task and metadata")
    entry = {
        "question": info.get("question", ""),
        "answer": ground_truth,
        "metadata": info["metadata"],
    }
    score = float(gym.get_score_answer_fn(info["task"])(solution_str, entry))
    return {"score": score, "acc": float(score >= 1.0)}


def built_in(name: str) -> Any:
    """A built-in verifier by name."""
    return {"exact_match": exact_match, "math": math, "reasoning_gym": reasoning_gym}[name]
