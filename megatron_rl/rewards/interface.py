"""The reward contract.

A reward function has the signature that users of verl know:

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

A dict must hold ``score`` and may hold ``acc``; other keys are kept. A failure of any kind - an
exception, a hang, a crash, a score that is no finite number - is a counted result with the
configured score, never a dead run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ScoreFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """One response to score."""

    data_source: str
    response: str
    """Text of the response, special tokens removed."""
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Score of one response."""

    score: float
    accuracy: float | None = None
    """1 for a correct answer, 0 for a wrong one; None when the function does not say."""
    failed: str | None = None
    """Why scoring failed; None when it did not."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further values the function returned: text, numbers and booleans."""


def call(function: ScoreFunction, request: RewardRequest, failure_score: float) -> RewardResult:
    """Scores one response; an exception becomes a failure with its type and message."""
    try:
        return parse_score(
            function(
                request.data_source, request.response, request.ground_truth, request.extra_info
            )
        )
    except Exception as error:
        return RewardResult(score=failure_score, failed=f"{type(error).__name__}: {error}")


def parse_score(returned: Any) -> RewardResult:
    """Turns what a reward function returned into a result.

    A plain 0 or 1 says whether the answer is right, so it is the accuracy too.

    Raises:
        ValueError: It is neither a finite number nor a mapping with a finite ``score``.
    """
    extra: dict[str, Any] = {}
    accuracy: Any = None
    score = returned
    if isinstance(returned, Mapping):
        extra = {str(k): v for k, v in returned.items() if k not in ("score", "acc", "accuracy")}
        accuracy = returned.get("acc", returned.get("accuracy"))
        score = returned.get("score")
    value = _number(score, "score", returned)
    if accuracy is not None:
        accuracy = _number(accuracy, "accuracy", returned)
    elif value in (0.0, 1.0):
        accuracy = value
    plain = {k: _scalar(v) for k, v in extra.items()}
    return RewardResult(
        score=value,
        accuracy=accuracy,
        extra={k: v for k, v in plain.items() if isinstance(v, str | int | float | bool)},
    )


def _number(value: Any, name: str, returned: Any) -> float:
    value = _scalar(value)
    if not isinstance(value, int | float):
        raise ValueError(f"returned {returned!r}, not a number or a dict with `score`")
    if not math.isfinite(value):
        raise ValueError(f"returned a {name} of {value}")
    return float(value)


def _scalar(value: Any) -> Any:
    """A number of NumPy, torch, fractions or decimal as Python's; anything else as it is."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return value
    return value if type(value) in (bool, int, float) else float(value)
