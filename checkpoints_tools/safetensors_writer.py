"""Writing one safetensors file tensor by tensor, in constant memory.

The format begins with a header of all names, shapes, dtypes and offsets, so a file can be streamed
as soon as these are known: what a conversion writes is therefore *planned* first. A `Piece` is what
is made in one go, such as a weight's codes together with its scales, and is written before the next
one is made. The checksum is taken on the way.

The format allows no gaps, and readers map tensors where they lie. So that each begins at a multiple
of its item size, tensors of odd sizes (a few block scales) come last in their file and wait for
their turn. Which tensors go to which file is decided in `checkpoints_tools.hf_writer`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.hashed_file import HashedFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls a dtype, and what torch does."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor that is still to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tensors that are made together, and stay together in one file."""

    tensors: tuple[PlannedTensor, ...]
    make: Callable[[], Iterable[tuple[str, Tensor]]]
    """Makes exactly `tensors`, in any order. Called once, on any thread."""

    @property
    def nbytes(self) -> int:
        """Size of all values in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


def write_safetensors(
    file: Path,
    pieces: Sequence[Piece],
    *,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Write a file to its end, and onto the disk.

    Args:
        file: File to make, with the permissions that the umask asks for.
        pieces: What it shall hold; each is made when its turn comes.
        on_bytes: Called with the number of bytes after each write. What it raises ends the writing.

    Returns:
        The file's SHA-256, in hexadecimal digits.
    """
    order = _file_order([tensor for piece in pieces for tensor in piece.tensors])
    with HashedFile(file) as out:
        # The last tensor must not outlive its writing: the next piece is made after it.
        def write_values(tensor: Tensor) -> None:
            for chunk in _chunks(tensor):
                out.write(chunk)
                on_bytes(len(chunk))

        out.write(_header(order))
        waiting: dict[str, Tensor] = {}
        turn = iter(order)
        wanted = next(turn, None)
        for piece in pieces:
            waiting |= _make(piece)
            while wanted is not None and wanted.name in waiting:
                write_values(waiting.pop(wanted.name))
                wanted = next(turn, None)
        assert wanted is None and not waiting
    return out.hexdigest()


def _make(piece: Piece) -> dict[str, Tensor]:
    planned = {tensor.name: tensor for tensor in piece.tensors}
    made = dict(piece.make())
    assert made.keys() == planned.keys(), (made.keys(), planned.keys())
    for name, tensor in made.items():
        given, expected = (tuple(tensor.shape), tensor.dtype), planned[name]
        assert given == (expected.shape, expected.dtype), (name, given, expected)
    return made


def _file_order(tensors: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """As given, but sizes that would misalign what follows last, the smallest items at the end."""

    def rank(tensor: PlannedTensor) -> int:
        return -tensor.dtype.itemsize if tensor.nbytes % _ALIGNMENT else -_ALIGNMENT

    return sorted(tensors, key=rank)


def _header(order: Sequence[PlannedTensor]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in order:
        content[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterable[memoryview]:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    data = memoryview(values)
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
