"""Reads the pickled index of a `torch_dist` checkpoint without running what it says.

`pickle.load` calls whatever a file names. Here a table lists the few classes that an index is made
of; a file that names anything else is refused, and the refusal says what it named.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from checkpoints_tools.guarded import Refused, guarded
from checkpoints_tools.te_tensors import TE_CLASSES

_TORCH = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


class _MegatronMetadata(Metadata):
    """What megatron-core 0.15 and older call `MCoreMetadata`."""


class _MegatronSavePlan(SavePlan):
    """What megatron-core 0.15 and older call `MCoreSavePlan`."""


def _path(*parts: str) -> str:
    """Stands for pathlib's classes: the path is of another machine, and only informs."""
    return "/".join(parts)


# (module, name) in the pickle -> what it becomes.
ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        (f"{_TORCH}.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {
        (f"{_TORCH}.planner", name): getattr(planner, name)
        for name in (
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    }
    | {
        (f"{_TORCH}.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        (_MEGATRON, "MCoreMetadata"): _MegatronMetadata,
        (_MEGATRON, "MCoreSavePlan"): _MegatronSavePlan,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): dict,
        ("pathlib", "PosixPath"): _path,
        ("pathlib._local", "PosixPath"): _path,
    }
)


_TE_GLOBALS = [(stand_in, ".".join(name)) for name, stand_in in TE_CLASSES.items()]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Refused(f"{module}.{name}")


def read_metadata(file: Path) -> Metadata:
    """Reads `.metadata`.

    Raises:
        ValueError: The file is missing, cut, of another kind, or names a class that an index of a
            checkpoint does not have.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing: {file.parent} is no complete torch_dist checkpoint.")
    content = guarded(file, _Unpickler(io.BytesIO(file.read_bytes())).load)
    if not isinstance(content, Metadata):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a checkpoint's metadata.")
    return content


def load_item(file: Path, stream: IO[bytes]) -> Any:
    """Reads one stored tensor or object; torch's own table of what it may name applies.

    Besides tensors and plain containers, byte streams are read (Transformer Engine's extra state),
    and its FP8 tensors, which become `TETensor`.

    Raises:
        ValueError: It names anything else, or is damaged.
    """

    def load() -> Any:
        with torch.serialization.safe_globals([io.BytesIO, *_TE_GLOBALS]):
            return torch.load(stream, map_location="cpu", weights_only=True)

    return guarded(file, load)
