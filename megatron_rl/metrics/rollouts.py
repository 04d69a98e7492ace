"""Rollouts on disk: a few samples of each step, and all held-out answers of each evaluation.

One JSONL file a step, written whole (temporary file and rename), so that a reader never meets half
a file and a step that is redone after a resume replaces its own. Held-out rows keep their order,
which pairs the answers before and after training by index.
"""

import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.metrics.files import (
    atomic_write,
    encode_float,
    join_lines,
    json_line,
    json_records,
    set_aside,
)

ROLLOUTS_FOLDER = "rollouts"
Kind = Literal["step", "eval"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A prompt, a response to it, and how it was scored."""

    step: int
    """Training step; 0 is before training."""
    data_source: str
    """Name of the data set that the row comes from."""
    prompt: str
    """The prompt's text."""
    response: str
    """The response's text."""
    ground_truth: Any
    """What the verifier compares with; any JSON value."""
    score: float
    """Reward."""
    accuracy: float | None
    """1 for a correct answer, 0 for a wrong one; ``None`` when the reward function does not say."""
    truncated: bool
    """The response was cut at the length limit."""
    response_length_tokens: int
    """Tokens of the response."""
    advantage: float | None = None
    """Advantage of a training sample; ``None`` in an evaluation."""
    mode: Literal["greedy", "sampled"] | None = None
    """Decoding of an evaluation; ``None`` for a training sample."""

    @property
    def is_correct(self) -> bool | None:
        """Whether the answer is right; ``None`` when the reward function does not say."""
        return None if self.accuracy is None else self.accuracy >= 1.0


def rollouts_path(run_dir: Path, step: int) -> Path:
    """Where the samples of a training step lie."""
    return run_dir / ROLLOUTS_FOLDER / f"step_{step:06d}.jsonl"


def evaluation_path(run_dir: Path, step: int) -> Path:
    """Where the held-out answers of an evaluation lie."""
    return run_dir / ROLLOUTS_FOLDER / f"eval_{step:06d}.jsonl"


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Writes a file of rollouts atomically, in the given order.

    Args:
        path: From :func:`rollouts_path` or :func:`evaluation_path`.
        rollouts: The samples.

    Raises:
        RunWriteError: The file cannot be written; files written before are kept.
    """
    atomic_write(path, join_lines(json_line(_to_record(rollout)) for rollout in rollouts))


def read_rollouts(path: Path) -> list[Rollout]:
    """Reads a file of rollouts.

    An absent file is an empty list, damaged lines are skipped with a warning.
    """
    if not path.exists():
        return []
    parsed = (_from_record(record, path) for _, record in json_records(path))
    return [rollout for rollout in parsed if rollout is not None]


def list_rollouts(run_dir: Path, kind: Kind) -> dict[int, Path]:
    """The files of training steps (``step``) or evaluations (``eval``) by step, ascending."""
    pattern = re.compile(rf"{kind}_(\d+)\.jsonl")
    found = {
        int(match[1]): path
        for path in (run_dir / ROLLOUTS_FOLDER).glob(f"{kind}_*.jsonl")
        if (match := pattern.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def start_rollouts(run_dir: Path, *, resume_step: int | None) -> None:
    """Prepares the folder for a run, as :class:`MetricsWriter` does for the metrics.

    Args:
        run_dir: The run directory.
        resume_step: Files of later steps are deleted (they will be redone); ``None`` sets the
            folder of an earlier run aside.
    """
    folder = run_dir / ROLLOUTS_FOLDER
    if not folder.exists():
        return
    if resume_step is None:
        set_aside(folder)
        return
    for kind in ("step", "eval"):
        for step, path in list_rollouts(run_dir, kind).items():
            if step > resume_step:
                path.unlink()


def _to_record(rollout: Rollout) -> dict[str, Any]:
    record = asdict(rollout)
    for key in ("score", "accuracy", "advantage"):
        if record[key] is not None:
            record[key] = encode_float(float(record[key]))
    for key in ("advantage", "mode"):
        if record[key] is None:
            del record[key]
    record["ground_truth"] = _jsonable(record["ground_truth"])
    return record


def _jsonable(value: Any) -> Any:
    """The value itself where JSON can hold it, else its text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def _from_record(record: dict[str, Any], path: Path) -> Rollout | None:
    def optional(key: str) -> float | None:
        return None if record.get(key) is None else float(record[key])

    try:
        return Rollout(
            step=int(record["step"]),
            data_source=str(record["data_source"]),
            prompt=str(record["prompt"]),
            response=str(record["response"]),
            ground_truth=record.get("ground_truth"),
            score=float(record.get("score", math.nan)),
            accuracy=optional("accuracy"),
            truncated=bool(record.get("truncated", False)),
            response_length_tokens=int(record.get("response_length_tokens", 0)),
            advantage=optional("advantage"),
            mode=record.get("mode"),
        )
    except (KeyError, TypeError, ValueError):
        logger.warning("%s holds a line that is no rollout; it is skipped", path)
        return None
