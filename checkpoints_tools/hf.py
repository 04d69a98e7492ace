"""Reading and writing Hugging Face model directories, one tensor at a time.

`HFReader` is a lazy mapping from tensor names to tensors over one or many safetensors files, which
are memory-mapped: a 70B checkpoint is readable on a small machine. `write_hf_directory` takes an
iterator and never holds more than one output shard. Both are strict, because a checkpoint that
lost a tensor still loads in many places and only scores badly.

Names and values are passed through as they are. What a tensor means, whether the set is complete,
and any change of dtype or layout is the caller's business. Pickled weights are not read.
"""

import json
import logging
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints_tools.atomic import new_directory
from checkpoints_tools.safetensors_writer import DTYPES, Piece, PlannedTensor, write_safetensors
from checkpoints_tools.source import TensorSource

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Everything besides config and weights that makes a model directory self-contained.
ASSET_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class HFReader(TensorSource):
    """The tensors of a Hugging Face model directory, read when asked for.

    Iterates in file order. Tensors are views of the memory-mapped file: read-only by convention.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the headers of all weight files.

        Args:
            path: Directory with `config.json` and `model.safetensors` or a sharded set with its
                index.

        Raises:
            ValueError: There is no such directory, it has no safetensors weights, a file is
                missing or damaged, or index and files disagree.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a directory with a Hugging Face model.")
        index = self.path / INDEX
        weight_map = _weight_map(index) if index.is_file() else None
        if weight_map is None:
            if not (self.path / _SINGLE).is_file():
                raise ValueError(_no_weights(self.path))
            names = [_SINGLE]
        else:
            names = sorted(set(weight_map.values()))
            if _SINGLE not in names and (self.path / _SINGLE).is_file():
                raise ValueError(
                    f"{self.path} has both {_SINGLE} and {INDEX}; remove the one that is stale."
                )
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing:
                raise ValueError(
                    f"{index} lists {missing[0]}, which is missing ({len(missing)} of "
                    f"{len(names)} shards are); download the checkpoint again."
                )
        self._opened = _Opened()
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name in names:
            self._read_header(self.path / name)
        for tensor, name in (weight_map or {}).items():
            if self._file_of.get(tensor) != self.path / name:
                raise ValueError(f"{index} places {tensor} in {name}, which does not have it.")

    def _read_header(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {key: opened.get_slice(key) for key in opened.keys()}
                shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
                dtypes = {key: _dtype(file, key, part) for key, part in slices.items()}
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged or was not written to its end ({error}); download it again."
            ) from error
        for key in shapes:
            if key in self._file_of:
                raise ValueError(
                    f"{key} is in two shards, {self._file_of[key].name} and {file.name}."
                )
        self._file_of |= dict.fromkeys(shapes, file)
        self._shapes |= shapes
        self._dtypes |= dtypes

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor, as stored.

        Raises:
            KeyError: There is no tensor of that name.
        """
        if name not in self._file_of:
            raise KeyError(f"{self.path} has no tensor {name}")
        tensor: Tensor = self._opened.get(self._file_of[name]).get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, without reading it."""
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tensor names."""
        return iter(self._file_of)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header.

        Raises:
            KeyError: There is no tensor of that name.
        """
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header.

        Raises:
            KeyError: There is no tensor of that name.
        """
        return self._dtypes[name]

    @property
    def asset_directory(self) -> Path:
        """The directory itself."""
        return self.path

    @property
    def config(self) -> dict[str, Any]:
        """Content of `config.json`.

        Raises:
            ValueError: The file is missing or not a JSON object.
        """
        return read_json(self.path / "config.json")

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """Content of `generation_config.json`, None when there is none."""
        file = self.path / "generation_config.json"
        return read_json(file) if file.is_file() else None


class _Opened(threading.local):
    """The file that a thread read from last, still open: a header of thousands of names is long."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._handle: Any = None

    def get(self, file: Path) -> Any:
        """The opened file."""
        if file != self._file:
            self._handle = safe_open(file, framework="pt")
            self._file = file
        return self._handle


def write_hf_directory(
    path: Path | str,
    *,
    hf_config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    assets_from: Path | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a model directory that appears whole or not at all.

    Args:
        path: Directory to make.
        hf_config: Content of `config.json`, plain JSON values.
        tensors: Names and tensors in any order, on any device. A tensor must not change after it
            was handed out.
        assets_from: Directory to copy tokenizer, chat template and generation config from.
        max_shard_bytes: Largest size of a weight file, in bytes; one tensor may exceed it.
        overwrite: Replace a non-empty directory.

    Raises:
        ValueError: `path` is taken, `assets_from` is no directory, there is no tensor, or a name
            comes twice. Nothing is left at `path`.
    """
    if assets_from is not None and not Path(assets_from).is_dir():
        raise ValueError(f"{assets_from} is not a directory to copy the tokenizer from.")
    with new_directory(Path(path), overwrite=overwrite) as directory:
        fill_hf_directory(
            directory, hf_config=hf_config, tensors=tensors, max_shard_bytes=max_shard_bytes
        )
        if assets_from is not None:
            copied = copy_assets(Path(assets_from), directory)
            logger.info("copied %s from %s", ", ".join(copied) or "no assets", assets_from)


def fill_hf_directory(
    directory: Path,
    *,
    hf_config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config and weights into an empty directory; not atomic, see `write_hf_directory`.

    Raises:
        ValueError: There is no tensor, or a name comes twice.
    """
    assert max_shard_bytes > 0
    shards: list[list[str]] = []
    pending: list[Piece] = []
    pending_bytes = total_bytes = 0
    seen: set[str] = set()

    def flush() -> None:
        # The final names need the number of shards, and nothing shall load before the end.
        write_safetensors(directory / f"{len(shards)}.part", pending)
        shards.append([tensor.name for piece in pending for tensor in piece.tensors])
        pending.clear()

    for name, given in tensors:
        if name in seen:
            raise ValueError(f"{name} was written twice: two sources claim the same tensor.")
        seen.add(name)
        tensor = given.detach().cpu()
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending.append(ready(name, tensor))
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    if not seen:
        raise ValueError("There is no tensor to write.")
    flush()

    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = shard_name(number, len(shards))
        (directory / f"{number}.part").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(directory / INDEX, index)
    write_json(directory / "config.json", hf_config)


def ready(name: str, tensor: Tensor) -> Piece:
    """A piece that is a tensor in memory."""
    planned = PlannedTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
    return Piece(tensors=(planned,), make=lambda: [(name, tensor)])


def shard_name(number: int, total: int) -> str:
    """File name of a shard, counted from 0; the only one has a name without numbers."""
    return _SINGLE if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def copy_assets(source: Path, directory: Path) -> list[str]:
    """Copy tokenizer, chat template and generation config.

    Returns:
        Names of the files that `source` had, in the order of `ASSET_NAMES`.
    """
    found = [name for name in ASSET_NAMES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, directory / name)
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: The file is missing or holds something else.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing: the directory is not a complete model.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, keys sorted as transformers does."""
    text = json.dumps(dict(content), indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _dtype(file: Path, name: str, part: Any) -> torch.dtype:
    """Dtype of a stored tensor; safetensors names it in its own words."""
    stored = part.get_dtype()
    if stored not in DTYPES:
        raise ValueError(
            f"{file} has {name} in {stored}, which is not read; expected one of "
            f"{', '.join(DTYPES)}."
        )
    return DTYPES[stored]


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map, so its shards are unknown.")
    bad = [name for name in weight_map.values() if Path(str(name)).name != name]
    if bad:
        raise ValueError(f"{index} lists {bad[0]!r}, which is not a file name in its directory.")
    return weight_map


def _no_weights(path: Path) -> str:
    pickled = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{path} has only {pickled[0]}: pickled weights are not read; save the model as "
            "safetensors first."
        )
    return f"{path} has no weights: neither {_SINGLE} nor {INDEX} is there."
