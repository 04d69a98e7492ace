"""What a person sees of a run: a header, one aligned line a step, evaluations, the result.

The lines and tables are built by pure functions (``console_lines``, ``console_tables``);
:class:`Console` only remembers what it needs to repeat the column header and to estimate the
remaining time. Deliberately no progress bar and no cursor movement: the same output is readable in
a terminal, in a SLURM log and through ``tail -f``.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import rich.console
from rich.console import RenderableType

from megatron_rl.metrics.console_lines import (
    COLUMNS,
    Column,
    RunHeader,
    column_header,
    evaluation_line,
    header_block,
    overflow_line,
    remaining_seconds,
    step_line,
    step_seconds,
    symbols_for,
)
from megatron_rl.metrics.console_tables import answers_table, before_after_table
from megatron_rl.metrics.evaluations import evaluation_changes, pair_answers, spread
from megatron_rl.metrics.rollouts import Rollout, list_rollouts, read_rollouts
from megatron_rl.metrics.text import encodable, format_duration, visible
from megatron_rl.metrics.writer import read_metrics

HEADER_EVERY_STEPS = 20
PLAIN_WIDTH = 100
ETA_WINDOW_STEPS = 10
SAMPLE_ANSWERS = 5


class Console:
    """Prints a run's progress to a stream, in the signs that its encoding has."""

    def __init__(
        self,
        *,
        total_steps: int,
        file: IO[str] | None = None,
        header_every_steps: int = HEADER_EVERY_STEPS,
        before: Mapping[str, float] | None = None,
        columns: Sequence[Column] = COLUMNS,
    ) -> None:
        """Prepares the console; prints nothing.

        Args:
            total_steps: Steps of the whole run.
            file: Stream; standard output by default.
            header_every_steps: Lines between repetitions of the column header.
            before: Metrics of the evaluation at step 0, for a resumed run.
            columns: What a step's line shows.
        """
        self._rich = rich.console.Console(file=file, markup=False, emoji=False, highlight=False)
        if not self._rich.is_terminal:
            self._rich.width = PLAIN_WIDTH
        self._encoding = self._rich.encoding
        self._symbols = symbols_for(self._encoding)
        self._total_steps = total_steps
        self._columns = columns
        self._header_every_steps = header_every_steps
        self._lines_since_header: int | None = None
        self._recent_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS)
        self._before: Mapping[str, float] = dict(before or {})

    def header(self, header: RunHeader) -> None:
        """Prints what the run is."""
        first, _, rest = header_block(header).partition("\n")
        self._line(first, style="bold")
        self._line(rest)
        self._line("")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step."""
        if self._lines_since_header in (None, self._header_every_steps):
            self._line(column_header(self._total_steps, self._columns), style="bold")
            self._lines_since_header = 0
        seconds = step_seconds(metrics)
        if seconds is not None:
            self._recent_s.append(seconds)
        eta_s = remaining_seconds(self._recent_s, self._total_steps - step)
        self._line(step_line(step, self._total_steps, metrics, eta_s, self._columns))
        assert self._lines_since_header is not None
        self._lines_since_header += 1
        if (overflow := overflow_line(step, metrics)) is not None:
            self._line(overflow, style="yellow")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of an evaluation.

        The one at step 0 is what later ones are compared with.
        """
        if step == 0:
            self._before = dict(metrics)
        self._line(evaluation_line(step, metrics, self._before), style="cyan")

    def message(self, text: str) -> None:
        """Prints a line of free text."""
        self._line(text)

    def summary(self, run_dir: Path, *, report: Path | None = None) -> None:
        """Prints the result: held-out measures before and after, sample answers, the report.

        Args:
            run_dir: The run directory; what an earlier part of a resumed run measured is there too.
            report: The report's path, when one was built.
        """
        lines = read_metrics(run_dir)
        if changes := evaluation_changes(lines):
            self._table("Held-out prompts before and after training", before_after_table(changes))
        evaluations = list_rollouts(run_dir, "eval")
        if 0 in evaluations and max(evaluations) > 0:
            pairs = pair_answers(
                *(self._read_shown(evaluations[step]) for step in (0, max(evaluations)))
            )
            chosen = [pairs[index] for index in spread(SAMPLE_ANSWERS, len(pairs))]
            if chosen:
                title = f"Greedy answers to {len(chosen)} of {len(pairs)} held-out prompts"
                self._table(f"{title}, evenly spaced", answers_table(chosen, self._symbols))
        if lines:
            self._line(f"\n{lines[-1].step} steps in {format_duration(lines[-1].time_s)}")
        if report is not None:
            self._line(f"report: {report}")

    def _read_shown(self, path: Path) -> list[Rollout]:
        """Reads rollouts with texts that the stream can show, so that columns stay aligned."""
        return [
            replace(
                row,
                prompt=encodable(row.prompt, self._encoding),
                response=encodable(row.response, self._encoding),
                ground_truth=encodable(str(row.ground_truth), self._encoding),
            )
            for row in read_rollouts(path)
        ]

    def _line(self, text: str, style: str | None = None) -> None:
        self._rich.print(
            encodable(visible(text), self._encoding), style=style, soft_wrap=True, crop=False
        )

    def _table(self, title: str, table: RenderableType) -> None:
        """Prints a table through a capture, so that no character of it can fail to encode."""
        self._line("")
        self._line(title, style="bold")
        with self._rich.capture() as capture:
            self._rich.print(table)
        self._rich.file.write(encodable(capture.get(), self._encoding))
        self._rich.file.flush()
