"""The closing tables of a run: held-out measures before and after training, and sample answers.

Cells are rich ``Text``, never markup, with control characters spelled out: prompts and answers
come from data sets and models, and must be shown, not obeyed.
"""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from megatron_rl.metrics.console_lines import Symbols
from megatron_rl.metrics.evaluations import AnswerPair, EvaluationChange
from megatron_rl.metrics.rollouts import Rollout
from megatron_rl.metrics.text import (
    format_change,
    format_fixed,
    format_percent,
    last_line,
    shorten,
    visible,
)


def before_after_table(changes: Sequence[EvaluationChange]) -> Table:
    """Held-out accuracy and reward before and after training, with the difference."""
    table = Table()
    for name in ("set", "measure", "decoding"):
        table.add_column(name, overflow="fold")
    last_step = max((item.after_step for item in changes), default=0)
    for name in ("before", f"after (step {last_step})" if last_step else "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in changes:
        is_accuracy = item.measure == "acc"
        values = (
            format_percent(value) if is_accuracy else format_fixed(value, 3)
            for value in (item.before, item.after)
        )
        table.add_row(
            visible(item.source),
            "exact match" if is_accuracy else "reward",
            item.decoding,
            *values,
            format_change(item.change, points=is_accuracy),
        )
    return table


def mark(rollout: Rollout, symbols: Symbols) -> str:
    """The sign of a right, a wrong or an unjudged answer."""
    if rollout.is_correct is None:
        return symbols.unknown
    return symbols.right if rollout.is_correct else symbols.wrong


def answers_table(pairs: Sequence[AnswerPair], symbols: Symbols) -> Table:
    """Sample answers before and after training, side by side.

    Args:
        pairs: The answers to show.
        symbols: Signs that the terminal can show.
    """
    table = Table(show_lines=True)
    table.add_column("prompt (last line)", overflow="fold", ratio=4)
    table.add_column("truth", overflow="fold", ratio=2)
    table.add_column("before", overflow="fold", ratio=4)
    table.add_column("after", overflow="fold", ratio=4)
    for pair in pairs:
        answers = (
            f"{mark(row, symbols)} {shorten(visible(row.response.strip()), 160) or '(empty)'}"
            for row in (pair.before, pair.after)
        )
        prompt = shorten(visible(last_line(pair.after.prompt)), 120)
        truth = shorten(visible(str(pair.after.ground_truth)), 60)
        table.add_row(*(Text(cell) for cell in (prompt, truth, *answers)))
    return table
