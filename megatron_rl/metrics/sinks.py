"""Where metrics go: a JSONL file always, TensorBoard and Weights & Biases on request.

Each sink takes the same ``(step, time, metrics)``. The optional libraries are imported when their
sink is made, so a run without them neither needs them nor waits for them.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics.files import append_line, atomic_write, encode_float, json_line

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_run_id.txt"
WANDB_STEP_KEY = "trainer/global_step"


class Sink(Protocol):
    """A destination of metrics."""

    path: Path
    """File or folder that the sink writes; errors name it."""

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step; ``time_s`` counts from the start of the run."""

    def close(self) -> None:
        """Flushes and releases what the sink holds."""


class JsonlSink:
    """Appends one JSON object a line to ``metrics.jsonl``; the file is valid JSONL after each call.

    A line is handed to the operating system by a single write, so it survives the death of the
    process (not of the machine: there is no fsync per line).
    """

    def __init__(self, path: Path) -> None:
        """Opens ``path`` for appending."""
        self.path = path
        self._descriptor: int | None = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Appends a line.

        Raises:
            OSError: The line did not fit; the earlier lines are as they were.
        """
        assert self._descriptor is not None, "log() after close()"
        encoded = {key: encode_float(value) for key, value in metrics.items()}
        append_line(
            self._descriptor,
            json_line({"step": step, "time_s": round(time_s, 3), "metrics": encoded}),
        )

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class TensorBoardSink:
    """Scalars as TensorBoard event files in ``run_dir/tensorboard``."""

    def __init__(self, run_dir: Path, *, resume_step: int | None) -> None:
        """Opens an event file; on resume, TensorBoard hides the points of steps that are redone."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ValueError(_missing("tensorboard", "tensorboard")) from error
        self.path = run_dir / TENSORBOARD_FOLDER
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(self.path), purge_step=purge_step)

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Adds one scalar a key."""
        del time_s  # TensorBoard stamps events itself
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """One Weights & Biases run per run directory, also over resumes.

    The W&B run id is kept in the run directory. W&B's own step only ever grows, so metrics are
    plotted over ``trainer/global_step``; after a resume, steps that are redone show twice at the
    same place.
    """

    def __init__(self, run_dir: Path, logging: LoggingConfig) -> None:
        """Starts the W&B run, or continues the one whose id the run directory holds."""
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ValueError(_missing("wandb", "wandb")) from error
        self.path = run_dir / "wandb"
        id_file = run_dir / WANDB_ID_FILE
        if not id_file.exists():
            atomic_write(id_file, secrets.token_hex(4) + "\n")
        config_file = run_dir / "config.yaml"
        self._run = wandb.init(
            project=logging.wandb_project,
            name=run_dir.name,
            id=id_file.read_text().strip(),
            # Offline, W&B cannot ask the server and ignores resume; `wandb sync` joins by id.
            resume="allow" if logging.wandb_mode == "online" else None,
            mode=logging.wandb_mode,
            dir=str(run_dir),
            config=yaml.safe_load(config_file.read_text()) if config_file.exists() else None,
        )
        self._run.define_metric(WANDB_STEP_KEY)
        self._run.define_metric("*", step_metric=WANDB_STEP_KEY)

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Sends the metrics as one W&B history row."""
        self._run.log({**metrics, WANDB_STEP_KEY: step, "trainer/time_s": time_s})

    def close(self) -> None:
        """Ends the W&B run after its data is written or sent."""
        self._run.finish()


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Converts scalars of any library (NumPy, zero-dimensional tensors) to floats.

    Raises:
        ValueError: A value is not a number; the message names its key.
    """
    result = {}
    for key, value in metrics.items():
        try:
            result[key] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"metric {key!r} is {value!r}, not a number; log scalars only"
            ) from error
    return result


def _missing(option: str, package: str) -> str:
    return (
        f"logging.{option}=true needs the package {package!r}; run `pip install {package}`, "
        f"or set logging.{option}=false"
    )
