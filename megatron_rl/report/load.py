"""Reads a run directory into one object that the report's parts share.

A report is most wanted when something went wrong, so every file may be missing or damaged: what
could not be read becomes a sentence in ``problems`` and the rest is shown.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.metrics.evaluations import EvaluationChange, evaluation_changes
from megatron_rl.metrics.gate import GateFinding, read_findings
from megatron_rl.metrics.writer import MetricsLine, read_metrics


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its directory tells it."""

    path: Path
    """The run directory."""
    config: Mapping[str, Any]
    """The resolved configuration; empty when it could not be read."""
    config_text: str
    """``config.yaml`` as written."""
    environment: Mapping[str, Any]
    """``env.json``; empty when it could not be read."""
    lines: tuple[MetricsLine, ...]
    """``metrics.jsonl`` in file order."""
    gate: tuple[GateFinding, ...] = ()
    """``gate.jsonl`` in file order."""
    problems: tuple[str, ...]
    """What is missing or damaged, one sentence each."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.config.get("name") or self.path.resolve().name)

    @cached_property
    def table(self) -> dict[int, dict[str, float]]:
        """All metrics of each step, ascending; of one key, the later line counts."""
        merged: dict[int, dict[str, float]] = {}
        for line in self.lines:
            merged.setdefault(line.step, {}).update(line.metrics)
        return dict(sorted(merged.items()))

    @cached_property
    def changes(self) -> list[EvaluationChange]:
        """Held-out measures before and after training."""
        return evaluation_changes(self.lines)

    @property
    def last_step(self) -> int:
        """The last training step with metrics; 0 when there is none."""
        return max(self.table, default=0)

    @property
    def total_steps(self) -> int | None:
        """The steps that the run was to make, when the configuration says."""
        total = self.setting("trainer.total_steps")
        return total if isinstance(total, int) else None

    @property
    def is_complete(self) -> bool:
        """Whether the last step was reached."""
        return self.total_steps is not None and self.last_step >= self.total_steps

    @property
    def wall_time_s(self) -> float:
        """Running time in seconds up to the last line."""
        return max((line.time_s for line in self.lines), default=0.0)

    def setting(self, dotted: str) -> Any:
        """A value of the configuration by its dotted name; ``None`` when it is not there."""
        node: Any = self.config
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps at which ``key`` was recorded, and its values."""
        found = [(step, metrics[key]) for step, metrics in self.table.items() if key in metrics]
        return [step for step, _ in found], [value for _, value in found]

    def mean(self, key: str) -> float | None:
        """The mean of ``key`` over all steps; ``None`` when it was never recorded."""
        values = self.series(key)[1]
        return math.fsum(values) / len(values) if values else None

    def highest(self, key: str) -> float | None:
        """The highest value of ``key``; ``None`` when it was never recorded."""
        return max(self.series(key)[1], default=None)


def load_run(run_dir: Path) -> RunData:
    """Reads a run directory, complete or not.

    Raises:
        ValueError: ``run_dir`` is no directory, or holds none of the files of a run.
    """
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir} is no directory; give the directory of a run (output_dir/name)"
        )
    config_text = _read_text(run_dir / "config.yaml")
    environment_text = _read_text(run_dir / "env.json")
    lines = tuple(read_metrics(run_dir))
    if not (config_text or environment_text or lines):
        raise ValueError(
            f"{run_dir} holds neither config.yaml nor metrics.jsonl; give the directory of a run "
            "(output_dir/name)"
        )
    config = _parse_mapping(yaml.safe_load, config_text, yaml.YAMLError)
    environment = _parse_mapping(json.loads, environment_text, ValueError)
    problems = []
    if not config:
        problems.append("config.yaml is missing or damaged: the configuration is unknown.")
    if not environment:
        problems.append("env.json is missing or damaged: versions and hardware are unknown.")
    return RunData(
        path=run_dir,
        config=config,
        config_text=config_text,
        environment=environment,
        lines=lines,
        gate=tuple(read_findings(run_dir)),
        problems=tuple(problems),
    )


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse_mapping(parse: Any, text: str, error: type[Exception]) -> Mapping[str, Any]:
    try:
        loaded = parse(text)
    except error:
        return {}
    return loaded if isinstance(loaded, dict) else {}
