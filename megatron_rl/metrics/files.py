"""Writing into a run directory so that a crash or a full disk costs at most what was being written.

Whole files appear atomically (temporary file, fsync, rename); lines are appended by a single
write. A failed write raises one error that names the path, the free space and what is safe.
Deliberately no retry and no buffering: a metric that was logged is in the file.
"""

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class RunWriteError(OSError):
    """A file of the run directory could not be written; the message is complete for the user."""

    def __str__(self) -> str:
        """The message without Python's ``[Errno N]`` prefix."""
        return str(self.strerror)


def write_error(path: Path, cause: OSError, *, safe: str) -> RunWriteError:
    """Builds the error of a failed write.

    Args:
        path: What was being written.
        cause: The operating system's error.
        safe: What is certainly intact, as a sentence.
    """
    message = (
        f"cannot write {path}: {cause.strerror or cause} ({_free_space(path)}). {safe} "
        "Make space or fix the file system, then start the same command again."
    )
    return RunWriteError(cause.errno, message)


def _free_space(path: Path) -> str:
    folder = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(folder)
    except OSError:  # a file system that went away; the cause is reported anyway
        return "free space unknown"
    return f"{usage.free / 2**30:.2f} GiB of {usage.total / 2**30:.0f} GiB free there"


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a whole file; readers see the old one or the new one, never a part.

    Args:
        path: Target; its folder is made when missing.
        content: Bytes, or text that is encoded as UTF-8 (unpaired surrogates become ``?``).

    Raises:
        RunWriteError: The disk is full or the folder cannot be written; an older file is kept.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(
            path, error, safe="No other file of the run was touched, and an older one here is kept."
        ) from error


def append_line(descriptor: int, line: bytes) -> None:
    """Appends ``line`` by one write; when it does not fit, the file is cut back to where it was.

    Args:
        descriptor: A regular file opened for appending.
        line: The line with its newline.

    Raises:
        OSError: The write failed; the file holds what it held before.
    """
    size_bytes = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(line):  # a second turn only after a short write, to learn its cause
            written += os.write(descriptor, line[written:])
    except OSError:
        if written:
            os.ftruncate(descriptor, size_bytes)
        raise


def set_aside(path: Path) -> Path:
    """Renames a file or folder of an earlier run to ``<name>.previous-<n>``; returns that path."""
    number = 1
    while (target := path.with_name(f"{path.name}.previous-{number}")).exists():
        number += 1
    path.rename(target)
    logger.warning("%s of an earlier run is kept as %s", path, target)
    return target


def json_line(record: Any) -> bytes:
    """One JSON line in ASCII. Non-finite floats must have gone through :func:`encode_float`."""
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def json_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields ``(raw line, record)`` of each line that holds a JSON object.

    Other lines (the last one after a crash, usually) are skipped with a warning: a log of
    thousands of lines must not be lost to one.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # JSONDecodeError and UnicodeDecodeError
            record = None
        if isinstance(record, dict):
            yield line + b"\n", record
        else:
            logger.warning("%s:%d is not a complete JSON object and is skipped", path, number)


def join_lines(lines: Iterable[bytes]) -> bytes:
    """Concatenates lines that already carry their newlines."""
    return b"".join(lines)


def encode_float(value: float) -> float | str:
    """A float as valid JSON: NaN and infinities become ``"nan"``, ``"inf"``, ``"-inf"``.

    ``float()`` of the result is the value again. JSON itself has no such numbers, and ``null``
    would lose which one it was.
    """
    return value if math.isfinite(value) else str(value)
