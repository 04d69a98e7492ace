"""Writing a planned model as a Hugging Face directory: shards, index, config, assets, manifest.

Everything that can be known before the first byte is checked before it: whether the target is free,
and whether the file system has room. Shards are independent, so several threads write one each;
memory is bounded by a few pieces a thread.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

from checkpoints_tools.atomic import check_free, new_directory
from checkpoints_tools.hf import INDEX, copy_assets, shard_name, write_json
from checkpoints_tools.manifest import write_manifest
from checkpoints_tools.progress import format_bytes
from checkpoints_tools.safetensors_writer import Piece, write_safetensors

MAX_SHARD_BYTES = 5_000_000_000
# For headers, config, tokenizer and the file system's own blocks.
_SPARE_BYTES = 64 << 20


def write_planned(
    target: Path,
    *,
    hf_config: Mapping[str, Any],
    pieces: Sequence[Piece],
    assets_from: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int = 1,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a model directory that appears whole or not at all.

    Args:
        target: Directory to make.
        hf_config: Content of `config.json`, plain JSON values.
        pieces: Every tensor, in the order in which it is to be written.
        assets_from: Directory to copy tokenizer, chat template and generation config from.
        max_shard_bytes: Largest size of a weight file, in bytes; one piece may exceed it.
        workers: Threads; each writes one shard at a time.
        overwrite: Replace a non-empty directory.
        on_bytes: Called with the number of bytes after each write, from any thread.

    Raises:
        ValueError: `target` is taken, there is no tensor, or a name comes twice.
        OSError: The file system has not enough room.
    """
    assert max_shard_bytes > 0 and workers > 0
    _check_names(pieces)
    check_free(target, overwrite=overwrite)
    check_space(target, sum(piece.nbytes for piece in pieces))
    shards = plan_shards(pieces, max_shard_bytes)
    with new_directory(target, overwrite=overwrite) as directory:
        sha256 = _write_shards(directory, shards, workers, on_bytes)
        if len(shards) > 1:
            write_json(directory / INDEX, _index(shards))
        write_json(directory / "config.json", hf_config)
        if assets_from is not None:
            copy_assets(assets_from, directory)
        write_manifest(directory, sha256=sha256)


def plan_shards(pieces: Sequence[Piece], max_shard_bytes: int) -> list[list[Piece]]:
    """Sort pieces into files, in order; a piece larger than a file gets one of its own."""
    shards: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not shards or piece.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(piece)
        room -= piece.nbytes
    return shards


def check_space(target: Path, nbytes: int) -> None:
    """Check that the file system of `target` can take so many bytes more.

    Raises:
        OSError: It cannot.
    """
    place = Path(target).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes + _SPARE_BYTES:
        raise OSError(
            f"{target} would take {format_bytes(nbytes)}, but its file system has only "
            f"{format_bytes(free)} free; free some space, or name a directory elsewhere."
        )


def _check_names(pieces: Sequence[Piece]) -> None:
    seen: set[str] = set()
    for piece in pieces:
        for tensor in piece.tensors:
            if tensor.name in seen:
                raise ValueError(
                    f"{tensor.name} was to be written twice: two sources claim the same tensor."
                )
            seen.add(tensor.name)
    if not seen:
        raise ValueError("There is no tensor to write.")


def _write_shards(
    directory: Path,
    shards: Sequence[Sequence[Piece]],
    workers: int,
    on_bytes: Callable[[int], None],
) -> dict[str, str]:
    """Write all shards; returns their checksums by file name."""
    stopped = Event()

    def count(nbytes: int) -> None:
        if stopped.is_set():
            raise InterruptedError("another shard failed")
        on_bytes(nbytes)

    def write(number: int) -> str:
        # Nothing shall load before the end, hence no name that a loader looks for.
        return write_safetensors(directory / f"{number}.part", shards[number], on_bytes=count)

    with ThreadPoolExecutor(min(workers, len(shards)), "shard") as pool:
        futures = [pool.submit(write, number) for number in range(len(shards))]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    sha256 = {}
    for number, future in enumerate(futures):
        name = shard_name(number, len(shards))
        (directory / f"{number}.part").rename(directory / name)
        sha256[name] = future.result()
    return sha256


def _index(shards: Sequence[Sequence[Piece]]) -> dict[str, Any]:
    weight_map = {
        tensor.name: shard_name(number, len(shards))
        for number, pieces in enumerate(shards)
        for piece in pieces
        for tensor in piece.tensors
    }
    total = sum(piece.nbytes for pieces in shards for piece in pieces)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
