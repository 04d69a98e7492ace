"""The tensors of a `torch_dist` directory, read piece by piece.

A tensor is stored in chunks, one for each part that a rank held; a read asks for a box of the
tensor and touches only the chunks that overlap it. Sizes and places are checked when the directory
is opened, so that a cut file is an error before a conversion begins.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from checkpoints_tools.guarded import guarded
from checkpoints_tools.te_tensors import TETensor
from checkpoints_tools.torch_dist.unpickle import load_item, read_metadata

METADATA = ".metadata"
BACKEND = "metadata.json"


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One stored piece of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _StorageInfo


class TorchDistReader:
    """The keys, shapes and values of a `torch_dist` directory."""

    def __init__(self, path: Path | str) -> None:
        """Reads the index and checks it against the files.

        Raises:
            ValueError: The directory is no `torch_dist` checkpoint, its index is refused or
                damaged, or a file is missing or cut.
        """
        self.path = Path(path)
        _check_backend(self.path)
        metadata = read_metadata(self.path / METADATA)
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._chunks: dict[str, tuple[_Chunk, ...]] = {}
        self._by_matrix: dict[str, dict[tuple[int, ...], tuple[_Chunk, ...]]] = {}
        self._objects: dict[str, _StorageInfo] = {}
        try:
            self._index(metadata)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path / METADATA} is damaged: {type(error).__name__} {error}; copy the "
                "checkpoint again."
            ) from error

    def _index(self, metadata: Metadata) -> None:
        places = {(i.fqn, i.offset): place for i, place in metadata.storage_data.items()}
        for place in places.values():
            self._check_place(place)
        self._check_lengths(list(places.values()))
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, BytesStorageMetadata):
                self._objects[key] = places[key, None]
                continue
            chunks = tuple(
                _Chunk(tuple(c.offsets), tuple(c.sizes), places[key, c.offsets])
                for c in stored.chunks
            )
            self._tensors[key], self._chunks[key] = stored, chunks
            self._by_matrix[key] = _by_matrix(chunks)
            for chunk in chunks:
                ends = [a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
                inside = len(ends) == len(stored.size) and all(
                    0 <= start and end <= size
                    for start, end, size in zip(chunk.offsets, ends, stored.size, strict=True)
                )
                if not inside:
                    raise ValueError(
                        f"{self.path / METADATA} places a chunk of {key} at "
                        f"{list(chunk.offsets)} with sizes {list(chunk.sizes)}, outside of its "
                        f"shape {list(stored.size)}; copy the checkpoint again."
                    )

    def _check_place(self, place: _StorageInfo) -> None:
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(
                f"{self.path / METADATA} names {place.relative_path!r}, which is not a file name "
                "in its directory."
            )
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"{self.path / METADATA} has tensors stored with "
                f"{place.transform_descriptors!r}, which is not read; save without extensions."
            )
        if place.offset < 0 or place.length <= 0:
            raise ValueError(
                f"{self.path / METADATA} places {place.length} bytes at {place.offset} of "
                f"{place.relative_path}; copy the checkpoint again."
            )

    def _check_lengths(self, places: Sequence[_StorageInfo]) -> None:
        needed: dict[str, int] = {}
        for place in places:
            end = place.offset + place.length
            needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
        for name, length in sorted(needed.items()):
            file = self.path / name
            actual = file.stat().st_size if file.is_file() else None
            if actual is None or actual < length:
                state = "is missing" if actual is None else f"has only {actual} of {length} bytes"
                raise ValueError(f"{file} {state}; copy the checkpoint again.")

    def __contains__(self, key: object) -> bool:
        """Whether there is a tensor of that key."""
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of tensors, in the index's order."""
        return iter(self._tensors)

    @property
    def object_keys(self) -> tuple[str, ...]:
        """Keys of what is stored as a pickled object, such as Transformer Engine's extra state."""
        return tuple(self._objects)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, from the index."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor, from the index."""
        return self._tensors[key].properties.dtype

    def read(
        self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Reads a box of a tensor.

        Args:
            key: Key of the tensor.
            offsets: First index along each axis; all zeros when None.
            sizes: Extent along each axis; to the end when None.

        Returns:
            Contiguous tensor of `sizes`.

        Raises:
            ValueError: The stored chunks do not cover the box, or one is damaged.
        """
        shape = self.shape(key)
        start = tuple(offsets) if offsets is not None else (0,) * len(shape)
        extent = tuple(sizes) if sizes is not None else shape
        assert len(start) == len(extent) == len(shape)
        assert all(0 <= a and a + n <= s for a, n, s in zip(start, extent, shape, strict=True))
        pieces = self._overlapping(key, start, extent)
        covered = sum(math.prod(size) for _, (_, size) in pieces)
        if covered != math.prod(extent):
            raise ValueError(
                f"{self.path / METADATA} has chunks of {key} for {covered} of "
                f"{math.prod(extent)} values at {list(start)}; copy the checkpoint again."
            )
        if len(pieces) == 1:
            return self._read_piece(key, *pieces[0])
        whole = torch.empty(extent, dtype=self.dtype(key))
        for chunk, (where, size) in pieces:
            target = whole
            for axis, (first, length) in enumerate(zip(where, size, strict=True)):
                target = target.narrow(axis, first - start[axis], length)
            target.copy_(self._read_piece(key, chunk, (where, size)))
        return whole

    def stored(
        self, key: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | TETensor]:
        """The chunks that overlap a box, whole and as stored, in the order of their offsets.

        Raises:
            ValueError: One is damaged.
        """
        pieces = self._overlapping(key, tuple(offsets), tuple(sizes))
        chunks = sorted((chunk for chunk, _ in pieces), key=lambda chunk: chunk.offsets)
        return [self._load(chunk.place) for chunk in chunks]

    def is_quantised(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether a box is stored as Transformer Engine's FP8 codes; reads a header only.

        Raises:
            ValueError: The file is damaged.
        """
        place = self._overlapping(key, tuple(offsets), tuple(sizes))[0][0].place
        file = self.path / place.relative_path

        def peek() -> bool:
            with file.open("rb") as opened:
                view = _create_file_view(opened, place.offset, place.length)
                pickled: bytes = torch._C.PyTorchFileReader(view).get_record("data.pkl")
                return b"transformer_engine" in pickled

        return bool(guarded(file, peek))

    def _overlapping(
        self, key: str, start: tuple[int, ...], extent: tuple[int, ...]
    ) -> list[tuple[_Chunk, tuple[tuple[int, ...], tuple[int, ...]]]]:
        """The chunks that have a part of a box, and which part."""
        chunks = self._chunks[key]
        leading = max(0, len(start) - 2)
        if all(size == 1 for size in extent[:leading]):
            # Of thousands of experts only one is asked for.
            chunks = self._by_matrix[key].get(start[:leading], chunks)
        return [
            (chunk, box)
            for chunk in chunks
            if (box := _overlap(chunk.offsets, chunk.sizes, start, extent)) is not None
        ]

    def _read_piece(
        self, key: str, chunk: _Chunk, box: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> Tensor:
        stored = self._load(chunk.place)
        if isinstance(stored, TETensor):
            stored = stored.dequantize().reshape(chunk.sizes)
        if (
            not isinstance(stored, Tensor)
            or tuple(stored.shape) != chunk.sizes
            or stored.dtype != self.dtype(key)
        ):
            found = (
                f"{stored.dtype} {list(stored.shape)}"
                if isinstance(stored, Tensor)
                else type(stored).__name__
            )
            raise ValueError(
                f"{self.path / chunk.place.relative_path} holds {found} where the index says that "
                f"{key} is {self.dtype(key)} {list(chunk.sizes)}; copy the checkpoint again."
            )
        for axis, (first, length) in enumerate(zip(*box, strict=True)):
            stored = stored.narrow(axis, first - chunk.offsets[axis], length)
        return stored.contiguous()

    def read_object(self, key: str) -> list[Any]:
        """Reads what is stored as an object: one entry a rank that shared the key.

        Only tensors, plain containers and byte streams are read.

        Raises:
            ValueError: It holds anything else, or is damaged.
        """
        content: list[Any] = self._load(self._objects[key])
        return content

    def _load(self, place: _StorageInfo) -> Any:
        file = self.path / place.relative_path
        with file.open("rb") as opened:
            return load_item(file, _create_file_view(opened, place.offset, place.length))


def _by_matrix(chunks: Sequence[_Chunk]) -> dict[tuple[int, ...], tuple[_Chunk, ...]]:
    """Chunks by their place on all axes but two; empty if one extends over several places."""
    found: dict[tuple[int, ...], list[_Chunk]] = {}
    for chunk in chunks:
        leading = max(0, len(chunk.offsets) - 2)
        if any(size != 1 for size in chunk.sizes[:leading]):
            return {}
        found.setdefault(chunk.offsets[:leading], []).append(chunk)
    return {place: tuple(held) for place, held in found.items()}


def is_torch_dist(path: Path) -> bool:
    """Whether a directory looks like a `torch_dist` checkpoint."""
    return (path / METADATA).is_file()


def _check_backend(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with a Megatron checkpoint.")
    file = path / BACKEND
    if not file.is_file():
        raise ValueError(f"{file} is missing: {path} is no complete Megatron checkpoint.")
    try:
        backend = json.loads(file.read_text()).get("sharded_backend")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not valid JSON of a checkpoint ({error}).") from error
    if backend != "torch_dist":
        raise ValueError(
            f"{file} says sharded_backend={backend!r}, and only torch_dist is read; save with "
            "Megatron's --ckpt-format torch_dist."
        )


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], start: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of what two boxes share, None when nothing."""
    first = tuple(max(a, b) for a, b in zip(offsets, start, strict=True))
    size = tuple(
        min(a + n, b + m) - f
        for a, n, b, m, f in zip(offsets, sizes, start, extent, first, strict=True)
    )
    return (first, size) if all(n > 0 for n in size) else None
