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
    """Further values the function returned."""


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
        extra = {k: v for k, v in returned.items() if k not in ("score", "acc", "accuracy")}
        accuracy = returned.get("acc", returned.get("accuracy"))
        score = returned.get("score")
    if isinstance(score, str) or not hasattr(score, "__float__"):
        raise ValueError(f"returned {returned!r}, not a number or a dict with `score`")
    value = float(score)
    if not math.isfinite(value):
        raise ValueError(f"returned a score of {value}")
    if accuracy is None and value in (0.0, 1.0):
        accuracy = value
    return RewardResult(
        score=value, accuracy=None if accuracy is None else float(accuracy), extra=extra
    )
