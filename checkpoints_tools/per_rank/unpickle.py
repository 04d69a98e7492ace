"""Reads a rank's file without running what it names.

Such a file pickles the arguments of the run, the optimizer and the random states beside the model:
any class of Megatron, of its plugins and of the user. What the table lists becomes a tensor; all
else becomes `Inert`, which takes whatever it is given and does nothing. So no code of the file's
choosing runs, and nothing but tensors and numbers comes out.
"""

import argparse
import collections
import pickle
import types
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from checkpoints_tools.guarded import guarded
from checkpoints_tools.te_tensors import TE_CLASSES, te_getattr

_TORCH = (
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
)


class Inert:
    """In place of everything that a model does not consist of."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> "Inert":
        """Takes any arguments."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Keeps none of them."""

    def __call__(self, *arguments: Any, **keywords: Any) -> "Inert":
        """What a call of it would give is as inert."""
        return self

    def __setstate__(self, state: Any) -> None:
        """Forgets it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forgets it."""

    def append(self, item: Any) -> None:
        """Forgets it."""

    def extend(self, items: Any) -> None:
        """Forgets them."""

    def add(self, item: Any) -> None:
        """Forgets it."""


def _attribute(owner: Any, name: str) -> Any:
    try:
        return te_getattr(owner, name)
    except ValueError:
        return Inert


ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {(module, name): getattr(torch._utils, name) for module, name in _TORCH}
    | dict(TE_CLASSES)
    | {(module, "getattr"): _attribute for module in ("builtins", "__builtin__")}
    | {
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("argparse", "Namespace"): argparse.Namespace,
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return Inert


def load_rank_file(file: Path) -> dict[str, Any]:
    """Maps a file; its tensors are read from disk when they are used.

    Raises:
        ValueError: It is damaged, or in torch's format of before 1.6.
    """
    # torch subclasses the unpickler of what it is given, so that its tensors are found.
    module = types.ModuleType("allow_listed")
    vars(module).update(Unpickler=_Unpickler, UnpicklingError=pickle.UnpicklingError)
    content = guarded(
        file,
        lambda: torch.load(
            str(file), map_location="cpu", mmap=True, weights_only=False, pickle_module=module
        ),
    )
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a rank's checkpoint.")
    return content
