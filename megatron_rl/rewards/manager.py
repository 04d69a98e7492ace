"""Scores a batch of responses within time limits, in order, whatever the reward function does."""

import json
import logging
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import IO, Any, Self

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.extract import extract_answer
from megatron_rl.rewards.interface import RewardRequest, RewardResult, parse_score
from megatron_rl.rewards.verifiers import IN_PROCESS, built_in

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Time limit of a worker's start, in which user code is imported."""


class RewardManager:
    """The reward function of a run, behind a time limit."""

    def __init__(self, config: RewardConfig) -> None:
        """Loads the function; starts workers when it may hang.

        ``auto`` is ``exact_match``: text or number equality with the row's ground truth.

        Raises:
            ValueError: The function cannot be loaded.
        """
        self._config = config
        name = "exact_match" if config.function == "auto" else config.function
        self._in_process = built_in(name) if name in IN_PROCESS else None
        self._workers: list[_Worker] = []
        self._warned: set[str] = set()
        if self._in_process is None:
            try:
                for _ in range(config.num_workers):
                    self._workers.append(_Worker(name))
            except ValueError:
                self.close()
                raise

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Scores responses; the result has their order. A failure is a result too."""
        extracted = [
            replace(r, response=extract_answer(r.response, self._config.extract)) for r in requests
        ]
        if self._in_process is not None:
            results = [self._score_in_process(request) for request in extracted]
        else:
            results = self._score_in_workers(extracted)
        self._report_failures(results)
        return results

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def _score_in_process(self, request: RewardRequest) -> RewardResult:
        assert self._in_process is not None
        return parse_score(
            self._in_process(request.data_source, request.response, request.ground_truth)
        )

    def _score_in_workers(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        results: list[RewardResult | None] = [None] * len(requests)
        pending: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(requests)):
            pending.put(index)

        def serve(worker: _Worker) -> None:
            while True:
                try:
                    index = pending.get_nowait()
                except queue.Empty:
                    return
                reply = worker.ask(asdict(requests[index]), self._config.timeout_s)
                results[index] = self._result(reply)

        threads = [threading.Thread(target=serve, args=(w,)) for w in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result is not None for result in results)
        return [result for result in results if result is not None]

    def _result(self, reply: dict[str, Any]) -> RewardResult:
        if "failed" in reply:
            return RewardResult(score=self._config.failure_score, failed=reply["failed"])
        return RewardResult(score=reply["score"], accuracy=reply["accuracy"], extra=reply["extra"])

    def _report_failures(self, results: Sequence[RewardResult]) -> None:
        failures = Counter(r.failed for r in results if r.failed is not None)
        for reason, count in failures.items():
            kind = reason.partition(":")[0]
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "reward function %s failed on %d responses (%s); each scores %s. Further "
                    "failures of "
                    "this kind are only counted, in rollout/reward_failures",
                    self._config.function,
                    count,
                    reason,
                    self._config.failure_score,
                )


class _Worker:
    """One scoring process, replaced when it hangs or dies."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._process = self._start()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to one request, or a failure after which the process is a new one."""
        try:
            stdin = _pipe(self._process.stdin)
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            line = _read_line(self._process, timeout_s)
        except BrokenPipeError:
            line = b""
        if line is None:
            failure = f"timed out after {timeout_s:g} s"
        elif not line:
            self._process.wait()
            failure = f"the worker died with status {self._process.returncode}"
        else:
            reply: dict[str, Any] = json.loads(line)
            return reply
        self.kill()
        self._process = self._start()
        return {"failed": failure}

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        _pipe(self._process.stdout).close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.worker", self._function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        line = _read_line(process, START_TIMEOUT_S)
        reply = json.loads(line) if line else {"error": "its worker did not start"}
        if "ready" not in reply:
            process.kill()
            process.wait()
            raise ValueError(reply["error"])
        return process


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """One line of output; None when the time is over, empty when the process ended."""
    stdout = _pipe(process.stdout)
    deadline = time.monotonic() + timeout_s
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                return None
            chunk = stdout.read(65536)
            if not chunk:
                return b""
            received += chunk
    return received
