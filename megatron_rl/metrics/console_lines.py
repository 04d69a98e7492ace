"""The lines of a run's progress: header, steps, evaluations; functions from values to strings.

A step's line is made for 80 columns and for ``grep``: fixed columns, one step a line, ``-`` for
what was not measured.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.metrics.evaluations import evaluation_changes
from megatron_rl.metrics.text import (
    encodable,
    format_change,
    format_count,
    format_duration,
    format_fixed,
    format_number,
    format_percent,
)
from megatron_rl.metrics.writer import MetricsLine


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What the run is, for its first lines."""

    name: str
    """Name of the run."""
    model: str
    """Model, with what helps to recognise it (parameters)."""
    flow: str
    """Precision flow and its one-line summary."""
    data: str
    """Training and held-out data."""
    steps: str
    """Number of steps and what one is (prompts x samples)."""
    run_dir: Path
    """Where everything is written."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further lines: label to text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbols:
    """Signs that not every terminal can show."""

    right: str
    wrong: str
    unknown: str


UNICODE_SYMBOLS = Symbols(right="✓", wrong="✗", unknown="·")
ASCII_SYMBOLS = Symbols(right="+", wrong="x", unknown="?")


def symbols_for(encoding: str) -> Symbols:
    """The signs that a stream of this encoding can show."""
    wanted = "".join((UNICODE_SYMBOLS.right, UNICODE_SYMBOLS.wrong, UNICODE_SYMBOLS.unknown))
    return UNICODE_SYMBOLS if encodable(wanted, encoding) == wanted else ASCII_SYMBOLS


def header_block(header: RunHeader) -> str:
    """The block at the start of a run, labels aligned."""
    rows = {
        "model": header.model,
        "flow": header.flow,
        "data": header.data,
        "steps": header.steps,
        **header.extra,
        "run dir": str(header.run_dir),
    }
    width = max(len(label) for label in rows)
    lines = [f"megatron-rl  {header.name}"]
    lines += [f"  {label:<{width}}  {text}" for label, text in rows.items()]
    return "\n".join(lines)


def tokens_per_second(metrics: Mapping[str, float]) -> float | None:
    """Tokens of the step over its seconds; without those, the speed of the rollout alone."""
    tokens, seconds = metrics.get("perf/total_num_tokens"), step_seconds(metrics)
    if tokens is not None and seconds:
        return tokens / seconds
    return metrics.get("perf/rollout_tokens_per_s")


def step_seconds(metrics: Mapping[str, float]) -> float | None:
    """Duration of a step in seconds."""
    return metrics.get("perf/time_per_step", metrics.get("timing_s/step"))


def _step_width(total_steps: int) -> int:
    return max(len("step"), 2 * len(str(total_steps)) + 1)


COLUMNS = (
    ("reward", 8),
    ("acc", 7),
    ("len", 7),
    ("entropy", 8),
    ("|dlogp|", 9),
    ("grad", 9),
    ("tok/s", 7),
    ("sec", 7),
    ("ETA", 8),
)
"""Columns of a step's line and their widths, after the step itself."""


def column_header(total_steps: int) -> str:
    """Names of the columns of :func:`step_line`."""
    names = "".join(f"{name:>{width}}" for name, width in COLUMNS)
    return f"{'step':>{_step_width(total_steps)}}{names}"


def step_line(
    step: int, total_steps: int, metrics: Mapping[str, float], eta_s: float | None
) -> str:
    """One step in the columns of :func:`column_header`; what was not measured shows as ``-``."""
    cells = (
        format_fixed(metrics.get("critic/rewards/mean"), 3),
        format_percent(metrics.get("train/accuracy")),
        format_fixed(metrics.get("response_length/mean"), 1),
        format_fixed(metrics.get("actor/entropy"), 3),
        format_number(metrics.get("rollout_corr/logp_diff_abs_mean"), 2),
        format_number(metrics.get("actor/grad_norm"), 3),
        format_count(tokens_per_second(metrics)),
        format_fixed(step_seconds(metrics), 1),
        format_duration(eta_s),
    )
    # A space before each cell keeps an unexpectedly wide value apart from its neighbour.
    body = "".join(f" {cell:>{width - 1}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    return f"{f'{step}/{total_steps}':>{_step_width(total_steps)}}{body}"


def remaining_seconds(recent_step_seconds: Iterable[float], steps_left: int) -> float | None:
    """Median of recent step times, for the steps that are left; ``None`` before the first step."""
    seconds = list(recent_step_seconds)
    return statistics.median(seconds) * steps_left if seconds else None


def evaluation_line(step: int, metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    """One evaluation: every held-out measure, with its change since ``before``.

    Args:
        step: Step after which it was made.
        metrics: Metrics with ``val-core/...`` keys; others are ignored.
        before: The metrics of the evaluation at step 0; empty when there was none.
    """
    changes = evaluation_changes(
        [
            MetricsLine(step=0, time_s=0.0, metrics=before),
            MetricsLine(step=max(step, 1), time_s=0.0, metrics=metrics),
        ]
        if step
        else [MetricsLine(step=0, time_s=0.0, metrics=metrics)]
    )
    by_source: dict[str, list[str]] = {}
    for item in changes:
        value = item.after if step else item.before
        if value is None:
            continue
        shown = format_percent(value) if item.measure == "acc" else format_fixed(value, 3)
        change = format_change(item.change, points=item.measure == "acc")
        suffix = f" ({change})" if item.change is not None else ""
        label = "accuracy" if item.measure == "acc" else "reward"
        samples = f"@{item.num_samples}" if item.num_samples else ""
        by_source.setdefault(item.source, []).append(f"{label}{samples} {shown}{suffix}")
    parts = [f"{source}: {', '.join(measures)}" for source, measures in by_source.items()]
    seconds = metrics.get("timing_s/eval")
    took = f"  [{format_duration(seconds)}]" if seconds is not None else ""
    return f"eval at step {step}  {'; '.join(parts) or 'nothing was measured'}{took}"
