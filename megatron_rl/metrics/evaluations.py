"""What training changed on held-out prompts: first evaluation against last.

The console's closing table and the report read it from the same functions, so they cannot
disagree. "Before" is always the evaluation at step 0; a run without one has no "before".
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.metrics.rollouts import Rollout
from megatron_rl.metrics.writer import MetricsLine

EVALUATION_KEY = re.compile(
    r"val-core/(?P<source>.+)/(?P<measure>reward|acc)/mean(@(?P<samples>\d+))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationChange:
    """One held-out measure before and after training."""

    source: str
    """Name of the held-out set."""
    measure: Literal["reward", "acc"]
    """``acc``: share of exact matches, 0 to 1. ``reward``: mean reward."""
    num_samples: int
    """0 for greedy decoding, else the samples per prompt that the mean is over."""
    before: float | None
    """Value before the first step."""
    after: float | None
    """Value of the last evaluation after a step.

    ``None`` when training has not been evaluated yet.
    """
    after_step: int
    """Step of the last evaluation."""

    @property
    def change(self) -> float | None:
        """After minus before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def decoding(self) -> str:
        """How the answers were decoded, for people."""
        return f"mean@{self.num_samples}" if self.num_samples else "greedy"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPair:
    """The greedy answers to one held-out prompt before and after training."""

    before: Rollout
    after: Rollout


def evaluation_changes(lines: Iterable[MetricsLine]) -> list[EvaluationChange]:
    """Compares the first and the last evaluation of every held-out measure.

    Returns:
        Greedy before sampled, accuracy before reward, sources in alphabetical order.
    """
    first: dict[str, tuple[int, float]] = {}
    last: dict[str, tuple[int, float]] = {}
    for line in lines:
        for key, value in line.metrics.items():
            if EVALUATION_KEY.fullmatch(key):
                if line.step <= first.get(key, (line.step, 0.0))[0]:
                    first[key] = (line.step, value)
                if line.step >= last.get(key, (line.step, 0.0))[0]:
                    last[key] = (line.step, value)
    changes = []
    for key in first:
        match = EVALUATION_KEY.fullmatch(key)
        assert match
        after_step, after = last[key]
        changes.append(
            EvaluationChange(
                source=match["source"],
                measure="acc" if match["measure"] == "acc" else "reward",
                num_samples=int(match["samples"] or 0),
                before=first[key][1] if first[key][0] == 0 else None,
                after=after if after_step > 0 else None,
                after_step=after_step,
            )
        )
    return sorted(changes, key=lambda item: (item.num_samples, item.measure, item.source))


def pair_answers(before: Sequence[Rollout], after: Sequence[Rollout]) -> list[AnswerPair]:
    """Pairs the greedy answers of two evaluations by row.

    Rows whose prompts differ are left out.
    """
    rows_before, rows_after = (
        [row for row in rows if row.mode != "sampled"] for rows in (before, after)
    )
    return [
        AnswerPair(before=old, after=new)
        for old, new in zip(rows_before, rows_after, strict=False)
        if (old.data_source, old.prompt) == (new.data_source, new.prompt)
    ]


def spread(count: int, total: int) -> list[int]:
    """At most ``count`` indices below ``total``, evenly spaced, ends included.

    A selection that favours nothing.
    """
    if count >= total:
        return list(range(total))
    if count <= 1:
        return list(range(count))
    return [round(index * (total - 1) / (count - 1)) for index in range(count)]
