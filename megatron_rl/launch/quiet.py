"""Keeps the console for the run: third-party noise goes to a file.

Libraries write to standard output and error from Python and from C++, so the file descriptors
themselves are switched; the run's own lines and log records go through duplicates made beforehand.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

NOISY = ("vllm", "torch", "transformers", "megatron", "megatron.core", "httpx", "filelock")


def open_console() -> TextIO:
    """Standard output as it is now; :func:`quiet` does not touch it."""
    return _duplicate(sys.stdout)


def configure_logging(level: str = "WARNING") -> None:
    """Standard logging with the rank in the format; third-party loggers only report errors."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=level,
        stream=_duplicate(sys.stderr),
        format=f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s",
    )
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # A failed write of a checkpoint is raised too, with a remedy; its traceback says no more.
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"(?!megatron_rl|checkpoints_tools)")


def _duplicate(stream: TextIO) -> TextIO:
    stream.flush()
    return open(os.dup(stream.fileno()), "w", buffering=1, encoding=stream.encoding)


@contextmanager
def quiet(log_file: Path) -> Iterator[None]:
    """Sends descriptors 1 and 2 to ``log_file`` (appended) while the block runs."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(target)
