"""Checksums of a written directory.

A copy over a network, or a disk, can lose bytes that no header misses. The manifest lists size and
SHA-256 of every file and is written last, so that a directory that has one was finished. It guards
against accidents, not against people.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "checkpoints_tools_manifest.json"
"""Name of the manifest in a Hugging Face directory."""


def write_manifest(
    directory: Path,
    *,
    sha256: Mapping[str, str] | None = None,
    name: str = MANIFEST,
    content: Mapping[str, Any] | None = None,
) -> None:
    """List every file of a directory, and put all of them onto the disk.

    Args:
        directory: The directory; files in sub-directories are listed by their relative path.
        sha256: Checksums that are known already, by relative path; the others are taken here.
        name: File name of the manifest.
        content: What else it shall hold, plain JSON values.
    """
    known = sha256 or {}
    files = {}
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        path = file.relative_to(directory).as_posix()
        if path == name:
            continue
        files[path] = {"size": file.stat().st_size, "sha256": known.get(path) or _sha256(file)}
        if path not in known:
            _fsync(file)
    manifest = directory / name
    text = json.dumps({**(content or {}), "files": files}, indent=2, sort_keys=True)
    manifest.write_text(text + "\n", encoding="utf-8")
    _fsync(manifest)
    _fsync(directory)


def check_manifest(directory: Path, *, name: str = MANIFEST) -> bool:
    """Compare every listed file with its size and checksum.

    Returns:
        Whether there is a manifest.

    Raises:
        ValueError: The manifest is damaged, or a file is missing or is not what was written.
    """
    manifest = directory / name
    if not manifest.is_file():
        return False
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        listed = [(path, entry["size"], entry["sha256"]) for path, entry in files.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{manifest} is damaged ({error!r}); get the directory again, or delete this file to "
            "do without checksums."
        ) from error
    for path, size, _ in listed:
        file = directory / path
        if not file.is_file():
            raise ValueError(f"{manifest} lists {path}, which is missing; get it again.")
        if file.stat().st_size != size:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes, but {size} were written; get it again."
            )
    for path, _, sha256 in listed:
        if _sha256(directory / path) != sha256:
            raise ValueError(f"{directory / path} is not what was written: its checksum differs.")
    return True


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
