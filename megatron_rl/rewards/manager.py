"""Scores a batch of responses within time limits, in order, whatever the reward function does."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.extract import extract_answer
from megatron_rl.rewards.interface import RewardRequest, RewardResult, call
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.verifiers import BUILT_IN, IN_PROCESS, built_in, verifier_of_row

logger = logging.getLogger(__name__)


class RewardManager:
    """The reward function of a run, behind a time limit.

    Plain comparisons run here; everything that may hang or crash runs in worker processes.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Loads the function.

        ``auto`` takes the verifier that the row names in ``extra_info.verifier`` (generated rows
        and rows with ``ability: math`` do), and ``exact_match`` for rows that name none.

        Raises:
            ValueError: The function cannot be loaded.
        """
        self._config = config
        self._pool: WorkerPool | None = None
        self._warned: set[str] = set()
        # A user's file may be wrong, which is to be known now. What is built in can wait for the
        # first row that needs it.
        if config.function not in BUILT_IN:
            self._start_pool()

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Scores responses; the result has their order. A failure is a result too."""
        extracted = [
            replace(r, response=extract_answer(r.response, self._config.extract)) for r in requests
        ]
        results: dict[int, RewardResult] = {}
        remote: list[int] = []
        for index, request in enumerate(extracted):
            verifier = self._verifier(request)
            if verifier in IN_PROCESS:
                results[index] = call(built_in(verifier), request, self._config.failure_score)
            else:
                remote.append(index)
        if remote:
            pool = self._pool or self._start_pool()
            try:
                replies = pool.run([asdict(extracted[index]) for index in remote])
            except BaseException:
                self.close()  # an interrupt leaves no hanging call behind
                raise
            results |= zip(remote, map(self._result, replies), strict=True)
        ordered = [results[index] for index in range(len(requests))]
        self._report_failures(ordered)
        return ordered

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

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

    def _start_pool(self) -> WorkerPool:
        config = self._config
        self._pool = WorkerPool(config.function, config.num_workers, config.timeout_s)
        return self._pool

    def _verifier(self, request: RewardRequest) -> str:
        function = self._config.function
        return verifier_of_row(request.extra_info) if function == "auto" else function

    def _result(self, reply: dict[str, Any]) -> RewardResult:
        if reply["failed"] is not None:
            return RewardResult(score=self._config.failure_score, failed=reply["failed"])
        return RewardResult(**reply)

    def _report_failures(self, results: Sequence[RewardResult]) -> None:
        counts: Counter[str] = Counter()
        reasons: dict[str, str] = {}
        for result in results:
            if result.failed is not None:
                kind = result.failed.partition(":")[0]
                counts[kind] += 1
                reasons.setdefault(kind, result.failed)
        for kind, count in counts.items():
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "reward function %s failed on %d of %d responses (%s); each scores %s. Further "
                    "failures of this kind are only counted, in rollout/reward_failures",
                    self._config.function,
                    count,
                    len(results),
                    reasons[kind],
                    self._config.failure_score,
                )
