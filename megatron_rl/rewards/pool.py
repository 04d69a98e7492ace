"""Worker processes that score responses, each replaced when it hangs or dies.

One loop in the calling thread serves all workers, so an interrupt leaves nothing running behind.
Knows nothing of what a score means: a request and its reply are JSON objects.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO, Any

START_TIMEOUT_S = 120.0
"""Time limit of a worker's start, in which user code is imported."""

ORPHAN_GRACE_S = 5.0
"""A worker whose trainer is gone ends itself this long after the time limit of its call."""


class WorkerPool:
    """Processes that run one reward function."""

    def __init__(self, function: str, num_workers: int, timeout_s: float) -> None:
        """Starts all workers at once and waits until each has loaded the function.

        Args:
            function: Built-in verifier or ``path/to/file.py:function``.
            num_workers: Processes.
            timeout_s: Time limit of one call.

        Raises:
            ValueError: The function cannot be loaded.
        """
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        try:
            self._workers += [_Worker(function, timeout_s) for _ in range(num_workers)]
            while any(worker.starting for worker in self._workers):
                for worker, line in self._events():
                    problem = worker.accept_start(line)
                    if problem:
                        raise ValueError(problem)
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replies in the order of the requests; one that got none is ``{"failed": reason}``."""
        replies: list[dict[str, Any] | None] = [None] * len(requests)
        pending = deque(range(len(requests)))
        problem = ""
        for worker in self._workers:
            if worker.idle and worker.dead:
                worker.restart()
        while any(reply is None for reply in replies):
            for worker in self._workers:
                if worker.idle and not worker.dead and pending:
                    index = pending.popleft()
                    worker.send(index, requests[index], self._timeout_s)
            if all(worker.idle for worker in self._workers):
                # No worker can be started any more. The next batch tries again.
                for index in pending:
                    replies[index] = {"failed": f"no worker: {problem}"}
                break
            for worker, line in self._events():
                if worker.starting:
                    problem = worker.accept_start(line) or problem
                else:
                    index, reply = worker.take_reply(line, self._timeout_s)
                    replies[index] = reply
        return [reply for reply in replies if reply is not None]

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _events(self) -> Iterator[tuple["_Worker", bytes | None]]:
        """Waits; then of each worker that has something to say its line.

        The line is empty when the process ended and None when its time is over.
        """
        waited = [worker for worker in self._workers if not worker.idle]
        with selectors.DefaultSelector() as selector:
            for worker in waited:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            now = time.monotonic()
            first = min(worker.deadline for worker in waited)
            readable = {key.data for key, _ in selector.select(max(0.0, first - now))}
        now = time.monotonic()
        for worker in waited:
            line = worker.read() if worker in readable else None
            if line is not None or now >= worker.deadline:
                yield worker, line


class _Worker:
    """One process: starting, then idle, or busy with one request."""

    def __init__(self, function: str, timeout_s: float) -> None:
        self._command = [
            sys.executable,
            "-m",
            "megatron_rl.rewards.worker",
            function,
            str(timeout_s + ORPHAN_GRACE_S),
        ]
        self._function = function
        self._index: int | None = None
        self._received = b""
        self._start()

    @property
    def idle(self) -> bool:
        """Neither starting nor busy."""
        return not self.starting and self._index is None

    @property
    def dead(self) -> bool:
        """The process has ended."""
        return self._process.poll() is not None

    def send(self, index: int, request: dict[str, Any], timeout_s: float) -> None:
        """Makes an idle worker busy."""
        self._index = index
        self.deadline = time.monotonic() + timeout_s
        try:
            self._input.write(json.dumps(request, default=str).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # its end is the next event

    def read(self) -> bytes | None:
        """A whole line, empty when the process ended, None when more is to come."""
        chunk = os.read(self.output.fileno(), 65536)
        if not chunk:
            return b""
        self._received += chunk
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        return line

    def accept_start(self, line: bytes | None) -> str | None:
        """Makes a starting worker idle; what is wrong when it has not loaded the function."""
        self.starting = False
        if line:
            reply: dict[str, Any] = json.loads(line)
            problem = reply.get("error")
        elif line is None:
            problem = f"reward.function={self._function!r} did not load in {START_TIMEOUT_S:g} s"
        else:
            problem = (
                f"reward.function={self._function!r}: its worker ended with status "
                f"{self._process.wait()} while loading it"
            )
        if problem:
            self.kill()
        return problem

    def take_reply(self, line: bytes | None, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Makes a busy worker idle, or a new one where it has no reply to give."""
        assert self._index is not None
        index, self._index = self._index, None
        if line:
            return index, json.loads(line)
        if line is None:
            failure = f"timed out after {timeout_s:g} s"
        else:
            failure = f"the worker died with status {self._process.wait()}"
        self.restart()
        return index, {"failed": failure}

    def restart(self) -> None:
        """Replaces the process."""
        self.kill()
        self._start()

    def kill(self) -> None:
        """Ends the process and what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # ended before
        self._process.wait()
        self.output.close()
        try:
            self._input.close()
        except BrokenPipeError:
            pass  # a request it never read

    def _start(self) -> None:
        self.starting = True
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self._index = None
        self._received = b""
        # A process group of its own: a terminal's interrupt is for the trainer, and what a
        # function started is killed with it.
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )

    @property
    def output(self) -> IO[bytes]:
        """Where its lines come from."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin
