"""Wall-clock seconds of the stages of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Seconds by stage; a stage measured twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the block's duration to ``stage``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed

    def metrics(self) -> dict[str, float]:
        """The seconds as ``timing_s/<stage>``."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
