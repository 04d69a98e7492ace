"""From a run to the plain values that the page shows: cards, tables, answers, samples.

Everything here is text or numbers; escaping and layout belong to the templates. What a run does
not have is left out or shown as ``-``, and never guessed.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.metrics.console_lines import step_seconds, tokens_per_second
from megatron_rl.metrics.evaluations import (
    AnswerPair,
    EvaluationChange,
    pair_answers,
    spread,
)
from megatron_rl.metrics.rollouts import Rollout, list_rollouts, read_rollouts
from megatron_rl.metrics.text import (
    format_change,
    format_count,
    format_duration,
    format_fixed,
    format_number,
    format_percent,
)
from megatron_rl.report.load import RunData

MAX_TABLE_STEPS = 500
MAX_ANSWERS = 60
Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str = ""
    before: str = ""
    """Value before training, shown in front of an arrow; empty when there is none."""
    change: str = ""
    """What training changed; empty when unknown."""
    tone: str = ""
    """``good``, ``bad`` or empty: colour of the change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStep:
    """Sample rollouts of one training step."""

    label: str
    rollouts: Sequence[Rollout]


def status_of(run: RunData) -> tuple[str, str]:
    """What state the run is in.

    ``(kind, sentence)`` with kind ``complete``, ``partial`` or ``empty``.
    """
    total = run.total_steps
    if run.last_step == 0:
        planned = f" of {total}" if total else ""
        return "empty", f"No training step recorded yet{planned and ' (0' + planned + ')'}"
    if total is None:
        return "partial", f"{run.last_step} steps recorded; the planned number is unknown"
    if run.is_complete:
        return "complete", f"Complete: {total} steps"
    return "partial", f"Partial: {run.last_step} of {total} steps"


def facts_of(run: RunData) -> list[tuple[str, str]]:
    """What the run is, as label and text."""
    environment, facts = run.environment, []
    model = run.setting("model.path")
    if model:
        facts.append(("Model", str(model).rstrip("/").rsplit("/", 1)[-1]))
    flow = environment.get("flow") or run.setting("precision.flow")
    if flow:
        summary = environment.get("flow_summary")
        facts.append(("Precision flow", f"{flow}: {summary}" if summary else str(flow)))
    if exactness := environment.get("flow_exactness"):
        facts.append(("Log-probs", str(exactness)))
    if quantised := environment.get("flow_quantised"):
        facts.append(("Quantised", str(quantised)))
    sources = {
        "Training data": run.setting("data.train"),
        "Held-out data": run.setting("data.val"),
    }
    for label, rows in sources.items():
        names = [str(row.get("name")) for row in rows or () if isinstance(row, Mapping)]
        if names:
            facts.append((label, ", ".join(names)))
    prompts, samples = run.setting("data.train_batch_size"), run.setting("rollout.n")
    estimator = run.setting("algorithm.advantage_estimator")
    if estimator and prompts and samples:
        facts.append(("Algorithm", f"{estimator}, {prompts} prompts × {samples} samples per step"))
    if started := environment.get("started_at"):
        facts.append(("Started", str(started).replace("T", " ", 1)))
    return facts


def warnings_of(run: RunData) -> list[str]:
    """What a reader must know before the results: mismatched formats, and what the gate found."""
    mismatch = run.environment.get("flow_mismatch")
    found = [str(mismatch)] if mismatch else []
    return found + [f"{finding.sentence()}." for finding in run.gate if not finding.is_within]


def _mean_change(changes: Sequence[EvaluationChange]) -> tuple[float | None, float | None]:
    """Means over held-out sets of before and after; ``None`` where a set has none."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if values and len(known) == len(values) else None

    return mean([item.before for item in changes]), mean([item.after for item in changes])


def headline_change(run: RunData) -> tuple[str, float | None, float | None] | None:
    """The measure that sums a run up: ``(acc or reward, before, after)``, greedy, held out.

    Accuracy where there is one, else reward; several held-out sets are averaged. ``None`` when
    nothing held-out was measured.
    """
    for measure in ("acc", "reward"):
        before, after = _mean_change(_greedy(run, measure))
        if before is not None or after is not None:
            return measure, before, after
    return None


def show_measure(measure: str, value: float | None) -> str:
    """An accuracy in percent, a reward with three decimals."""
    return format_percent(value) if measure == "acc" else format_fixed(value, 3)


def _greedy(run: RunData, measure: str) -> list[EvaluationChange]:
    return [item for item in run.changes if item.measure == measure and not item.num_samples]


def _change_card(run: RunData, measure: str, label: str) -> Card | None:
    """The card of a greedy held-out measure, averaged over the held-out sets."""
    changes = _greedy(run, measure)
    before, after = _mean_change(changes)
    if before is None and after is None:
        return None
    note = f"greedy, {changes[0].source}" if len(changes) == 1 else f"mean of {len(changes)} sets"
    if before is None or after is None:
        when = "before training only" if after is None else "after training only"
        value = show_measure(measure, before if after is None else after)
        return Card(label=label, value=value, note=f"{when}; {note}")
    change = after - before
    return Card(
        label=label,
        before=show_measure(measure, before),
        value=show_measure(measure, after),
        change=format_change(change, points=measure == "acc"),
        note=note,
        tone="good" if change > 0 else "bad" if change < 0 else "",
    )


def headline_cards(run: RunData) -> tuple[Card, list[Card]]:
    """The one result of the run, and the numbers beside it."""
    reward_steps, rewards = run.series("critic/rewards/mean")
    training = Card(label="Training reward", value="-", note="no step recorded yet")
    if rewards:
        training = Card(
            label="Training reward",
            before=format_fixed(rewards[0], 3) if len(rewards) > 1 else "",
            value=format_fixed(rewards[-1], 3),
            note=f"steps {reward_steps[0]} and {reward_steps[-1]}"
            if len(rewards) > 1
            else f"step {reward_steps[0]}",
        )
    candidates = [
        _change_card(run, "acc", "Held-out accuracy (exact match)"),
        _change_card(run, "reward", "Held-out reward"),
        training,
    ]
    hero, *rest = [card for card in candidates if card]
    total = f" of {run.total_steps}" if run.total_steps else ""
    seconds = [value for row in run.table.values() if (value := step_seconds(row)) is not None]
    per_step = f"{format_duration(sum(seconds) / len(seconds))} per step" if seconds else ""
    mismatch = run.mean("rollout_corr/logp_diff_abs_mean")
    exact = run.mean("rollout_corr/exact_share")
    rest += [
        Card(label="Steps", value=f"{run.last_step}{total}"),
        Card(label="Wall time", value=format_duration(run.wall_time_s), note=per_step),
        Card(
            label="Mean |Δ\u00a0log\u00a0p|",
            value=format_number(mismatch),
            note="mismatch in nats per token" if mismatch is not None else "not measured",
        ),
        Card(
            label="Exactly equal log-probs",
            value=format_share(exact),
            note="of all sampled tokens" if exact is not None else "not measured",
        ),
    ]
    return hero, rest


def format_share(share: float | None) -> str:
    """A share as a percentage that says 100% only of all: 0.99999 is ``>99.9%``."""
    if share is not None and 0.9995 <= share < 1:
        return ">99.9%"
    return "100%" if share == 1 else format_percent(share)


def answer_pairs(run: RunData) -> list[AnswerPair]:
    """Greedy answers of the first and the last evaluation, paired; empty without both."""
    evaluations = list_rollouts(run.path, "eval")
    if 0 not in evaluations or len(evaluations) < 2:
        return []
    return pair_answers(read_rollouts(evaluations[0]), read_rollouts(evaluations[max(evaluations)]))


def chosen_answers(pairs: Sequence[AnswerPair]) -> list[AnswerPair]:
    """An evenly spaced selection, so that the page favours neither gains nor losses."""
    return [pairs[index] for index in spread(MAX_ANSWERS, len(pairs))]


def transitions(pairs: Sequence[AnswerPair]) -> list[tuple[str, str, int]]:
    """How answers changed: ``(css class, label, count)``; empty when no answer was judged."""
    judged = [
        (pair.before.is_correct, pair.after.is_correct)
        for pair in pairs
        if pair.before.is_correct is not None and pair.after.is_correct is not None
    ]
    kinds = (
        ("kept", "right before and after", (True, True)),
        ("gained", "became right", (False, True)),
        ("lost", "became wrong", (True, False)),
        ("missed", "wrong before and after", (False, False)),
    )
    return [(name, label, judged.count(kind)) for name, label, kind in kinds] if judged else []


def sample_steps(run: RunData) -> list[SampleStep]:
    """Samples of the first, the middle and the last step that has some."""
    files = list_rollouts(run.path, "step")
    steps = list(files)
    names = {1: ("",), 2: ("First", "Last")}.get(len(steps), ("First", "Middle", "Last"))
    samples = []
    for name, index in zip(names, spread(3, len(steps)), strict=False):
        step = steps[index]
        label = f"{name} step ({step})" if name else f"Step {step}"
        samples.append(SampleStep(label=label, rollouts=read_rollouts(files[step])))
    return samples


Column = tuple[str, str, Callable[[Row], str]]


def _column(head: str, key: str, show: Callable[[float | None], str]) -> Column:
    return head, key, lambda row: show(row.get(key))


STEP_COLUMNS: tuple[Column, ...] = (
    _column("reward", "critic/rewards/mean", lambda value: format_fixed(value, 3)),
    _column("accuracy", "train/accuracy", format_percent),
    _column("length", "response_length/mean", lambda value: format_fixed(value, 1)),
    _column("truncated", "response_length/clip_ratio", format_percent),
    _column("entropy", "actor/entropy", lambda value: format_fixed(value, 3)),
    _column("loss", "actor/pg_loss", format_number),
    _column("grad norm", "actor/grad_norm", format_number),
    _column("clipped", "actor/pg_clipfrac", format_percent),
    _column("|Δ log p|", "rollout_corr/logp_diff_abs_mean", format_number),
    _column("equal", "rollout_corr/exact_share", format_share),
    ("tokens/s", "perf/*", lambda row: format_count(tokens_per_second(row))),
    ("seconds", "perf/time_per_step", lambda row: format_fixed(step_seconds(row), 1)),
)
"""Columns of the table of steps: head, metric key (shown as a tooltip), cell."""


def step_table(run: RunData) -> tuple[list[tuple[str, str]], list[tuple[int, list[str]]], int]:
    """The table of steps: ``(heads with keys, rows, number of steps)``.

    Long runs are thinned evenly.
    """
    steps = [step for step in run.table if step > 0]
    shown = [steps[index] for index in spread(MAX_TABLE_STEPS, len(steps))]
    columns = [
        column
        for column in STEP_COLUMNS
        if any(column[2](run.table[step]) != "-" for step in shown)
    ]
    rows = [(step, [cell(run.table[step]) for _, _, cell in columns]) for step in shown]
    return [(head, key) for head, key, _ in columns], rows, len(steps)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions, hardware and command as label and text."""
    rows: list[tuple[str, str]] = []
    for key, value in environment.items():
        if key == "command" and isinstance(value, list):
            rows.append((key, " ".join(str(part) for part in value)))
        elif isinstance(value, Mapping):
            rows += [(str(name), _plain(item)) for name, item in value.items()]
        else:
            rows.append((str(key).replace("_", " "), _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
