"""The files around a checkpoint's data: what is complete, what is newest, and how one replaces one.

A save fills ``global_step_N.partial``, writes the manifest there last, and then renames it to
``global_step_N``. So a step that is saved again keeps its old checkpoint until the new one is
complete, and whatever stops a save leaves nothing that counts.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
_LEFTOVER = re.compile(r"global_step_\d+\.(partial|replaced)")


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"global_step_{step}"


def staging_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written until it is complete."""
    return root / f"global_step_{step}.partial"


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under ``root``, ascending."""
    names = [
        path.parent.name.removeprefix("global_step_")
        for path in root.glob(f"global_step_*/{MANIFEST}")
    ]
    # A user's copy, such as global_step_20.best, is left alone.
    return sorted(int(name) for name in names if name.isdecimal())


def newest_step(root: Path) -> int | None:
    """The step that a run continues from: the one saved last, which is not always the highest.

    A run that went back to an older checkpoint saves lower steps than those that it left behind.
    Where the last one saved is gone, the highest complete one counts.
    """
    _finish_replacements(root)
    steps = complete_steps(root)
    try:
        latest = int((root / LATEST).read_text())
    except (OSError, ValueError):
        latest = -1
    return latest if latest in steps else max(steps, default=None)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads and checks a checkpoint's manifest.

    Raises:
        ValueError: The directory is no complete checkpoint, or a file of it is missing or cut.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is no complete checkpoint: it has no {MANIFEST}")
    manifest: dict[str, Any] = json.loads(path.read_text())
    for name, size in manifest["files"].items():
        file = directory / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            raise ValueError(
                f"checkpoint file {file} has {actual or 0} bytes instead of {size}; "
                "resume from an older checkpoint with trainer.resume_mode=path"
            )
    return manifest


def prepare_staging(root: Path, step: int) -> Path:
    """Makes the empty directory that a step is saved into; removes what dead saves left."""
    _finish_replacements(root)
    for path in root.glob("global_step_*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    directory = staging_path(root, step)
    directory.mkdir(parents=True)
    return directory


def publish(root: Path, step: int, manifest: dict[str, Any], *, keep: int) -> Path:
    """Makes a written checkpoint the newest complete one, then deletes the oldest others.

    Args:
        root: Directory of the run's checkpoints.
        step: Step whose staging directory holds every data file.
        manifest: What the manifest says besides the files.
        keep: Complete checkpoints to keep.
    """
    staging = staging_path(root, step)
    files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    _write_text(staging / MANIFEST, json.dumps({**manifest, "files": files}, indent=1) + "\n")
    # From here on the step is saved: a run that dies now finds it, and finishes the replacement.
    _write_text(root / LATEST, f"{step}\n")
    _replace(staging)
    shutil.rmtree(_replaced_path(checkpoint_path(root, step)), ignore_errors=True)
    # The new one stays even where a run that went back to an older checkpoint left later ones.
    others = [other for other in complete_steps(root) if other != step]
    for old in others[: max(0, len(others) + 1 - keep)]:
        # Without its manifest a half-deleted checkpoint is not mistaken for a complete one.
        (checkpoint_path(root, old) / MANIFEST).unlink()
        shutil.rmtree(checkpoint_path(root, old))
    return checkpoint_path(root, step)


def _replaced_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".replaced")


def _replace(staging: Path) -> None:
    """Moves a complete staging directory into place, and what was there aside."""
    directory = staging.with_name(staging.name.removesuffix(".partial"))
    if directory.exists():
        directory.rename(_replaced_path(directory))
    staging.rename(directory)


def _finish_replacements(root: Path) -> None:
    """Ends what a run that died in :func:`publish` began; every rank may do so at one time."""
    for manifest in root.glob(f"global_step_*.partial/{MANIFEST}"):
        if not _LEFTOVER.fullmatch(manifest.parent.name):
            continue
        try:
            _replace(manifest.parent)
        except OSError as error:
            # Another rank was faster: a rename onto a checkpoint, or of one that moved, fails.
            logger.debug("%s: %s", manifest.parent, error)


def _write_text(path: Path, text: str) -> None:
    """Writes a small file whole: beside its place, then renamed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
