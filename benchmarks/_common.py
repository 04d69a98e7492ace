"""What the benchmarks share: contenders that take turns, spreads, tables. Standard library only.

A contender is a process that loads everything, waits, and measures one round when it is told to.
Only one works at a time: the others are stopped meanwhile, with all their threads.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Contender:
    """The benchmark's side of a contender process."""

    def __init__(
        self, name: str, module: str, job: dict[str, Any], log: Path, python: str = sys.executable
    ) -> None:
        """Starts the process and waits until it is ready.

        Args:
            name: Shown in tables and errors.
            module: Module whose ``__main__`` plays the part.
            job: Sent as the first message.
            log: File that takes the process's output.
            python: Interpreter.
        """
        self.name = name
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-m", module],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                preexec_fn=_end_with_parent,
            )
        self.ready = self.turn(job)

    def turn(self, message: dict[str, Any]) -> dict[str, Any]:
        """One turn: sends a message and waits for the answer."""
        assert self._process.stdin and self._process.stdout
        self._process.send_signal(signal.SIGCONT)
        # A process that has ended answers nothing, which is told below.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)
        if not answer:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{self.name} ended before it answered; end of {self._log}:\n{tail}")
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end_with_parent() -> None:
    """Runs in the new process: a stopped contender must not outlive the benchmark (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Turns:
    """The contender's side: reads messages, answers; anything printed goes to standard error."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def wait(self) -> dict[str, Any]:
        """The next message; ends the process when there is none."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        message: dict[str, Any] = json.loads(line)
        return message

    def answer(self, message: dict[str, Any]) -> None:
        """Ends the turn."""
        self._answers.write(json.dumps(message) + "\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are figures."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """The processor and the cores that this process may use."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Python {platform.python_version()}"


def write_markdown(text: str, path: Path | None) -> None:
    """Prints, and writes the same to a file where one is given."""
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
