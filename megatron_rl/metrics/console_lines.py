"""The lines of a run's progress: header, steps, evaluations; functions from values to strings.

A step's line is made for 80 columns and for ``grep``: fixed columns, one step a line, ``-`` for
what was not measured.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Precision flow: its summary, and what it promises; a line each."""
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
    below = "\n" + " " * (width + 4)
    lines += [f"  {label:<{width}}  {text}".replace("\n", below) for label, text in rows.items()]
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


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a step's line, other than the step itself."""

    name: str
    width: int
    """Characters, the space before the value included."""
    cell: Callable[[Mapping[str, float], float | None], str]
    """The text of a step's metrics and the remaining seconds."""


def _metric(key: str, form: Callable[..., str], *digits: int) -> Callable[..., str]:
    return lambda metrics, eta_s: form(metrics.get(key), *digits)


_LENGTH = Column("len", 7, _metric("response_length/mean", format_fixed, 1))
_PROGRESS = (
    Column("grad", 9, _metric("actor/grad_norm", format_number, 3)),
    Column("tok/s", 7, lambda metrics, eta_s: format_count(tokens_per_second(metrics))),
    Column("sec", 7, lambda metrics, eta_s: format_fixed(step_seconds(metrics), 1)),
    Column("ETA", 8, lambda metrics, eta_s: format_duration(eta_s)),
)
COLUMNS = (
    Column("reward", 8, _metric("critic/rewards/mean", format_fixed, 3)),
    Column("acc", 7, _metric("train/accuracy", format_percent)),
    _LENGTH,
    Column("entropy", 8, _metric("actor/entropy", format_fixed, 3)),
    Column("|dlogp|", 9, _metric("rollout_corr/logp_diff_abs_mean", format_number, 2)),
    *_PROGRESS,
)
"""Columns of a step of reinforcement learning."""
SFT_COLUMNS = (
    Column("loss", 8, _metric("sft/loss", format_fixed, 4)),
    Column("perplexity", 12, _metric("sft/perplexity", format_number, 4)),
    _LENGTH,
    *_PROGRESS,
)
"""Columns of a step of supervised fine-tuning."""


def column_header(total_steps: int, columns: Sequence[Column] = COLUMNS) -> str:
    """Names of the columns of :func:`step_line`."""
    names = "".join(f"{column.name:>{column.width}}" for column in columns)
    return f"{'step':>{_step_width(total_steps)}}{names}"


def step_line(
    step: int,
    total_steps: int,
    metrics: Mapping[str, float],
    eta_s: float | None,
    columns: Sequence[Column] = COLUMNS,
) -> str:
    """One step in the columns of :func:`column_header`; what was not measured shows as ``-``."""
    # A space before each cell keeps an unexpectedly wide value apart from its neighbour.
    body = "".join(f" {column.cell(metrics, eta_s):>{column.width - 1}}" for column in columns)
    return f"{f'{step}/{total_steps}':>{_step_width(total_steps)}}{body}"


def overflow_line(step: int, metrics: Mapping[str, float]) -> str | None:
    """Says that an overflow skipped optimizer steps of this step; None when there was none."""
    skipped = metrics.get("actor/skipped_steps", 0.0)
    if not skipped:
        return None
    steps = "1 optimizer step" if skipped == 1 else f"{skipped:.0f} optimizer steps"
    return f"step {step}: overflow, {steps} skipped; loss scale {metrics['actor/loss_scale']:.10g}"


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
