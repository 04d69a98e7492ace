"""A whole Megatron directory: weights, config, tokenizer and a manifest, or nothing."""

from collections.abc import Callable
from pathlib import Path

from checkpoints_tools.atomic import check_free, new_directory
from checkpoints_tools.hf import copy_assets, write_json
from checkpoints_tools.hf_writer import check_space
from checkpoints_tools.manifest import write_manifest
from checkpoints_tools.source import TensorSource
from checkpoints_tools.torch_dist.writer import Plan, write_checkpoint

MANIFEST = "manifest.json"


def write_directory(
    target: Path,
    source: TensorSource,
    plan: Plan,
    *,
    workers: int = 1,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes a directory that `megatron.core.dist_checkpointing` loads.

    Args:
        target: Directory to make.
        source: Where config and tokenizer come from.
        plan: What to write, from `plan_checkpoint`.
        workers: Threads; each writes one file at a time.
        max_file_bytes: Largest size of a file, in bytes; one tensor may exceed it.
        overwrite: Replace a non-empty directory.
        on_bytes: Called with the number of bytes after each tensor, from any thread.

    Raises:
        ValueError: `target` is taken, or a tensor cannot be read.
        OSError: The file system has not enough room.
    """
    check_free(target, overwrite=overwrite)
    check_space(target, plan.nbytes)
    with new_directory(target, overwrite=overwrite) as directory:
        sha256 = write_checkpoint(
            directory, plan, workers=workers, max_file_bytes=max_file_bytes, progress=on_bytes
        )
        write_json(directory / "config.json", source.config)
        if source.asset_directory is not None:
            copy_assets(source.asset_directory, directory)
        write_manifest(directory, sha256=sha256, name=MANIFEST, content={"kind": "weights"})
