"""The metrics of a run on disk: one writer, one reader.

``metrics.jsonl`` is the record that everything else (console summary, report, comparison) is built
from. The writer belongs to one process of a run, rank 0.
"""

import logging as std_logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics.files import (
    atomic_write,
    join_lines,
    json_records,
    set_aside,
    write_error,
)
from megatron_rl.metrics.sinks import (
    METRICS_FILE,
    JsonlSink,
    Sink,
    TensorBoardSink,
    WandbSink,
    as_floats,
)

logger = std_logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsLine:
    """One line of ``metrics.jsonl``."""

    step: int
    """Training step; 0 is before training. Several lines may share a step."""
    time_s: float
    """Running time in seconds since the start of the run; waiting for a resume does not count."""
    metrics: Mapping[str, float]
    """Values by key; may be NaN or infinite."""


def read_metrics(run_dir: Path) -> list[MetricsLine]:
    """Reads ``metrics.jsonl`` in file order; an absent file is an empty list.

    Lines that are no complete record (the last one after a crash) are skipped with a warning.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    return [line for _, record in json_records(path) if (line := _parse(record, path)) is not None]


def _parse(record: Mapping[str, Any], path: Path) -> MetricsLine | None:
    try:
        return MetricsLine(
            step=int(record["step"]),
            time_s=float(record["time_s"]),
            metrics={str(key): float(value) for key, value in record["metrics"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        logger.warning("%s holds a line that is no metrics record; it is skipped", path)
        return None


class MetricsWriter:
    """Writes metrics to ``metrics.jsonl`` and to what else the configuration asks for.

    Non-finite values are written as the JSON strings ``"nan"``, ``"inf"``, ``"-inf"``, which
    :func:`read_metrics` turns back into floats.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingConfig,
        *,
        resume_step: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the sinks.

        Args:
            run_dir: The run directory; made when missing.
            logging: Which sinks.
            resume_step: The step of the checkpoint that the run continues from: later lines are
                dropped, and time continues where the last kept line ended. ``None`` for a fresh
                start: metrics that lie there are set aside.
            clock: Seconds from any origin.

        Raises:
            RunWriteError: The run directory cannot be written.
            ValueError: A package that the configuration asks for is not installed.
        """
        assert resume_step is None or resume_step >= 0, resume_step
        path = run_dir / METRICS_FILE
        elapsed_s = 0.0 if resume_step is None else _drop_after(path, resume_step)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is None and path.exists():
                set_aside(path)
            sink = JsonlSink(path)
        except OSError as error:
            raise write_error(path, error, safe="Nothing of the run was lost.") from error
        self._sinks: list[Sink] = [sink]
        if logging.tensorboard:
            self._sinks.append(TensorBoardSink(run_dir, resume_step=resume_step))
        if logging.wandb:
            self._sinks.append(WandbSink(run_dir, logging))
        self._clock = clock
        self._start_s = clock() - elapsed_s

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step; no metrics, no line.

        Args:
            step: Training step, 0 for the evaluation before training.
            metrics: Scalars by key; anything that ``float()`` takes.

        Raises:
            RunWriteError: A sink could not be written (a full disk). What was logged is kept.
            ValueError: A value is not a number; nothing of this call is written.
        """
        assert step >= 0, step
        values = as_floats(metrics)
        if not values:
            return
        time_s = self._clock() - self._start_s
        for sink in self._sinks:
            try:
                sink.log(step, time_s, values)
            except OSError as error:
                raise write_error(
                    sink.path,
                    error,
                    safe=f"All metrics before step {step} and every complete checkpoint are safe.",
                ) from error

    def close(self) -> None:
        """Flushes and closes every sink; may be called twice."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the sinks."""
        self.close()


def _drop_after(path: Path, resume_step: int) -> float:
    """Rewrites the file without the lines of later steps.

    Returns the time of the last kept line.
    """
    if not path.exists():
        return 0.0
    kept: list[bytes] = []
    time_s = 0.0
    for raw, record in json_records(path):
        line = _parse(record, path)
        if line is not None and line.step <= resume_step:
            kept.append(raw)
            time_s = max(time_s, line.time_s)
    atomic_write(path, join_lines(kept))
    return time_s
