"""What the mismatch gate found, in the run directory and for people.

``gate.jsonl`` holds one finding a line: the first step of the run, of each resumed part, and each
warning.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.metrics.files import (
    append_line,
    encode_float,
    json_line,
    json_records,
    write_error,
)
from megatron_rl.metrics.text import format_number

GATE_FILE = "gate.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDifference:
    """A sampled token whose two log-probs differ."""

    step: int
    """Training step."""
    prompt_index: int
    """Prompt within the step's batch, from 0."""
    sample_index: int
    """Response to that prompt, from 0."""
    position: int
    """Place in the response, from 0."""
    token_id: int
    """The token."""
    text: str
    """Its text."""
    train_logprob: float
    """Under the policy, as training computes it."""
    rollout_logprob: float
    """As it was sampled."""

    def sentence(self) -> str:
        """One line for the console and the report."""
        return (
            f"step {self.step}, prompt {self.prompt_index}, sample {self.sample_index}, position "
            f"{self.position}: token {self.token_id} {self.text!r} has log-prob "
            f"{self.rollout_logprob:.6g} in rollout and {self.train_logprob:.6g} in training"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateFinding:
    """The measured difference of one step and the bound it was compared with."""

    step: int
    """Training step."""
    is_first: bool
    """Whether it is the first step of a run or of a resumed one, where weights are identical."""
    mean: float
    """Mean ``|log p(train) - log p(rollout)|`` over the sampled tokens, in nats."""
    max: float
    """The largest one."""
    bound: float
    """Largest accepted mean."""
    is_within: bool
    """Whether the mean is accepted."""
    worst: tuple[TokenDifference, ...] = ()
    """Tokens that differ most, worst first; empty where the mean is accepted."""

    def sentence(self) -> str:
        """What was found, without a full stop."""
        mean = format_number(self.mean)
        if self.is_within:
            return (
                f"step {self.step}: rollout and training agree; mean |dlogp| {mean} is within "
                f"{format_number(self.bound)}"
            )
        what = "of identical weights" if self.is_first else "of a run that claims exactness"
        return (
            f"step {self.step}: log-probs {what} differ between rollout and training: mean |dlogp| "
            f"{mean} (largest {format_number(self.max)}) is over the bound of "
            f"{format_number(self.bound)}"
        )

    def message(self) -> str:
        """The sentence, and a line for each of the worst tokens."""
        lines = [self.sentence(), *(f"  {token.sentence()}" for token in self.worst)]
        return "\n".join(lines if self.is_within else [f"WARNING: {lines[0]}", *lines[1:]])


def append_finding(run_dir: Path, finding: GateFinding) -> None:
    """Adds a finding to the run directory.

    Raises:
        RunWriteError: The disk is full or the directory cannot be written.
    """
    path = run_dir / GATE_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            append_line(descriptor, json_line(_encode(asdict(finding))))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_error(path, error, safe="Earlier findings are kept.") from error


def read_findings(run_dir: Path) -> list[GateFinding]:
    """Findings in file order; lines that hold none are skipped."""
    path = run_dir / GATE_FILE
    if not path.is_file():
        return []
    findings = []
    for _, record in json_records(path):
        try:
            findings.append(_decode(record))
        except (KeyError, TypeError, ValueError):
            continue
    return findings


def _encode(value: Any) -> Any:
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(record: Mapping[str, Any]) -> GateFinding:
    numbers = {key: float(record[key]) for key in ("mean", "max", "bound")}
    worst = tuple(
        TokenDifference(
            **token | {key: float(token[key]) for key in ("train_logprob", "rollout_logprob")}
        )
        for token in record["worst"]
    )
    return GateFinding(**(dict(record) | numbers | {"worst": worst}))
