"""How far a conversion is, on standard error.

On a terminal one line is rewritten; in a log file there is a line every ten seconds, so that a job
that takes hours leaves a readable record and one that takes a second leaves its result only.
"""

import sys
import time
from collections.abc import Callable
from threading import Lock
from typing import TextIO

_TERMINAL_INTERVAL_S = 0.2
_LOG_INTERVAL_S = 10.0


class Progress:
    """Counts bytes, from any thread, and says how many there are to go.

    A context manager: the summary is printed at the end, unless the block raises.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            what: What is done, such as `writing out/model`; begins each line.
            total_bytes: Bytes that the whole takes.
            quiet: Print nothing.
            stream: Where to print; standard error when None.
            clock: Seconds from any beginning.
        """
        self._what, self._total, self._quiet = what, total_bytes, quiet
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._interval = _TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S
        self._clock = clock
        self._start = self._printed = clock()
        self._done = 0
        self._lock = Lock()

    def __call__(self, nbytes: int) -> None:
        """Count bytes that were just done."""
        with self._lock:
            self._done += nbytes
            now = self._clock()
            if not self._quiet and now - self._printed >= self._interval:
                self._printed = now
                self._print(self._line(now), is_last=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._quiet:
            return
        if kind is None:
            seconds = max(self._clock() - self._start, 1e-9)
            rate = format_bytes(round(self._done / seconds))
            text = f"{self._what}: {format_bytes(self._done)} in {seconds:.1f} s ({rate}/s)"
            self._print(text, is_last=True)
        elif self._is_terminal and self._printed != self._start:
            self._stream.write("\n")

    def _line(self, now: float) -> str:
        share = 100 * self._done // max(self._total, 1)
        left = (now - self._start) * (self._total - self._done) / max(self._done, 1)
        return (
            f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)} ({share} %), "
            f"{left:.0f} s left"
        )

    def _print(self, text: str, *, is_last: bool) -> None:
        if self._is_terminal:
            # Carriage return, then erase what is left of the line.
            self._stream.write(f"\r{text}\x1b[K" + ("\n" if is_last else ""))
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


def format_bytes(nbytes: int) -> str:
    """A size for people: `512 B`, `1.25 GB` (decimal units, as disks and `--max-shard-size`)."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}"
