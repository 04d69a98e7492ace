"""A directory that appears whole or not at all.

A conversion that is interrupted halfway must not leave something that loads. Everything is written
into a hidden sibling of the target, which is renamed at the end: on one file system a rename is
atomic. Only the target's own file system is used, never the system's temporary directory. It does
not guard against two writers of one target; the second one to finish fails or replaces the first.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Write a directory atomically.

    Args:
        target: Where the directory shall be. Missing parents are made.
        overwrite: Replace a directory that is there and not empty.

    Yields:
        A temporary empty directory beside `target`. When the block ends it becomes `target`; when
        the block raises, it is removed and `target` is as it was.

    Raises:
        ValueError: `target` is a file, or a non-empty directory and `overwrite` is off.
    """
    target = Path(os.path.abspath(target))
    check_free(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    # mkdir rather than tempfile: the directory gets the permissions that the user's umask asks for.
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    partial.mkdir()
    try:
        yield partial
        # Asked again: the block may have taken hours.
        check_free(target, overwrite=overwrite)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(target: Path, *, overwrite: bool) -> None:
    """Check that a directory may be written.

    Raises:
        ValueError: `target` is a file, or a non-empty directory and `overwrite` is off.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a directory to write to.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(
            f"{target} exists and is not empty; remove it, name another directory, "
            "or give --overwrite."
        )


def _replace(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    # A non-empty directory cannot be renamed over. The old one is only removed after the new one
    # stands.
    old = partial.with_suffix(".old")
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)
