"""Writes a model as a `torch_dist` directory, one tensor in memory at a time.

What Megatron does not need to compute is computed from headers: all keys, shapes, dtypes and the
division into files are known before the first tensor is read. Each file is then filled by one
thread, which reads a tensor when its turn has come, and is checksummed as it is written.

The vocabulary is written without padding: megatron-core fills what a layout adds with zeros, so
the directory loads at every tensor- and pipeline-parallel size.
"""

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils import serialization

from checkpoints_tools.hashed_file import HashedFile
from checkpoints_tools.hf import write_json
from checkpoints_tools.pieces import checked_map
from checkpoints_tools.source import TensorSource
from checkpoints_tools.torch_dist.keys import KeyMap
from checkpoints_tools.torch_dist.reader import BACKEND, METADATA
from megatron_rl.models.entry import ParameterEntry

COMMON = "common.pt"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of one stored tensor, and how to get it."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint before it is written."""

    chunks: tuple[Chunk, ...]
    shapes: Mapping[str, tuple[int, ...]]
    object_keys: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of all values, in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)


def plan_checkpoint(source: TensorSource) -> Plan:
    """Decides what is written where.

    Raises:
        ValueError: The source is not of its config, see `pieces.checked_map`, or tensors that
            Megatron stores as one have different dtypes.
    """
    chunks: list[Chunk] = []
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, tuple[torch.dtype, str]] = {}
    parameters = checked_map(source)
    keys = KeyMap(parameters)
    for entry in parameters:
        _check_one_dtype(source, entry)
        for place in keys.written(entry):
            (key,) = place.keys
            shapes[key] = (*place.stack, *entry.shape)
            dtype = source.dtype(entry.hf_names[0])
            first, name = dtypes.setdefault(key, (dtype, entry.hf_names[0]))
            if dtype != first:
                raise ValueError(
                    f"{entry.hf_names[0]} is {dtype} but {name} is {first}: tensors that Megatron "
                    "stores as one must have one dtype; convert with --dtype."
                )
            for row, rows, read in _pieces(source, entry):
                offsets = (*place.index, row, *(0 for _ in entry.shape[1:]))
                sizes = (*(1 for _ in place.index), rows, *entry.shape[1:])
                chunks.append(Chunk(key, offsets, sizes, dtype, read))
    return Plan(tuple(chunks), shapes, tuple(keys.extra_states()))


def _check_one_dtype(source: TensorSource, entry: ParameterEntry) -> None:
    for name in entry.hf_names:
        dtype, first = source.dtype(name), source.dtype(entry.hf_names[0])
        if dtype != first:
            raise ValueError(
                f"{name} is {dtype} but {entry.hf_names[0]} is {first}: tensors that Megatron "
                "fuses must have one dtype; convert with --dtype."
            )


def _pieces(
    source: TensorSource, entry: ParameterEntry
) -> list[tuple[int, int, Callable[[], Tensor]]]:
    """First row, rows and content of the chunks of a parameter, as megatron-core cuts it."""
    if entry.kind != "fused_gate_up":
        read = partial(entry.to_megatron, source)
        return [(0, entry.shape[0], read)]
    rows = entry.hf_shapes[0][0]
    return [
        (number * rows, rows, partial(source.__getitem__, name))
        for number, name in enumerate(entry.hf_names)
    ]


def write_checkpoint(
    directory: Path,
    plan: Plan,
    *,
    workers: int = 1,
    max_file_bytes: int = 5_000_000_000,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """Writes a plan into an empty directory; not atomic by itself.

    Args:
        directory: Where to write.
        plan: What to write.
        workers: Files that are written at one time.
        max_file_bytes: Size at which a new file begins; one tensor may exceed it.
        progress: Called with the bytes of each tensor that was written; from any thread.

    Returns:
        SHA-256 of each file, by name.

    Raises:
        ValueError: A tensor cannot be read, or its values are not as announced.
        OSError: There is no room.
    """
    limit = max(1, min(max_file_bytes, -(-plan.nbytes // workers)))
    groups = _grouped(plan.chunks, limit)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    digests: dict[str, str] = {}
    # The archives lie one after another in a file, which no program looks at as archives; what
    # they hold has SHA-256 sums. Without CRC32 sums beside them, writing is a third faster.
    without_crc32 = serialization.config.patch("save.compute_crc32", False)
    with without_crc32, ThreadPoolExecutor(max_workers=workers) as pool:
        jobs = [
            pool.submit(
                _write_file,
                directory / f"__0_{number}.distcp",
                group,
                plan.object_keys if number == 0 else (),
                progress,
            )
            for number, group in enumerate(groups)
        ]
        try:
            for job in jobs:
                name, digest, places = job.result()
                digests[name] = digest
                storage |= places
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    common = io.BytesIO()
    torch.save({}, common)
    _write_bytes(directory / COMMON, common.getvalue())
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    write_json(directory / BACKEND, backends | versions)
    # Without its index the directory is no checkpoint: last.
    _write_bytes(directory / METADATA, pickle.dumps(_metadata(plan, storage)))
    for name in (COMMON, BACKEND, METADATA):
        digests[name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    return digests


def _grouped(chunks: Sequence[Chunk], limit: int) -> list[list[Chunk]]:
    """Consecutive chunks of at most `limit` bytes together, or one larger one."""
    groups: list[list[Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        if groups[-1] and size + chunk.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.nbytes
    return groups


def _write_file(
    file: Path,
    chunks: Sequence[Chunk],
    object_keys: Sequence[str],
    progress: Callable[[int], None],
) -> tuple[str, str, dict[MetadataIndex, _StorageInfo]]:
    places: dict[MetadataIndex, _StorageInfo] = {}

    def save(content: Any, index: MetadataIndex) -> None:
        start = stream.position
        try:
            torch.save(content, stream)
        except RuntimeError as error:
            # torch's archive writer hides why a write failed, and so that the disk is full.
            raise stream.error or error from error
        places[index] = _StorageInfo(file.name, start, stream.position - start)

    with HashedFile(file) as stream:
        for key in object_keys:
            save([None], MetadataIndex(key))
        for chunk in chunks:
            save(_values(chunk), MetadataIndex(chunk.key, chunk.offsets))
            progress(chunk.nbytes)
    return file.name, stream.hexdigest(), places


def _values(chunk: Chunk) -> Tensor:
    tensor = chunk.read().detach().cpu()
    if tensor.dtype != chunk.dtype:
        raise ValueError(f"{chunk.key} was announced as {chunk.dtype} and read as {tensor.dtype}.")
    tensor = tensor.reshape(chunk.sizes).contiguous()
    # torch.save writes the whole storage that a view belongs to.
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _metadata(plan: Plan, storage: Mapping[MetadataIndex, _StorageInfo]) -> Metadata:
    tensors: dict[str, Any] = {}
    for chunk in plan.chunks:
        if chunk.key not in tensors:
            tensors[chunk.key] = TensorStorageMetadata(
                TensorProperties(dtype=chunk.dtype), torch.Size(plan.shapes[chunk.key]), []
            )
        place = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        tensors[chunk.key].chunks.append(place)
    return Metadata(
        state_dict_metadata=tensors | {key: BytesStorageMetadata() for key in plan.object_keys},
        storage_data=dict(storage),
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _write_bytes(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
