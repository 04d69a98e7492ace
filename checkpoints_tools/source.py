"""The interface through which every command reads a model.

A `TensorSource` is a lazy mapping by Hugging Face name. It knows names, shapes and dtypes from
headers, so that a conversion is planned, checked and priced before the first tensor is read, and it
reads a tensor only when it is asked for it, so that models larger than memory pass through.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TensorSource(Mapping[str, Tensor]):
    """A model's tensors by Hugging Face name, each read when asked for."""

    path: Path
    """The directory or file that was opened; for messages."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Content of the model's `config.json`."""

    @property
    @abstractmethod
    def asset_directory(self) -> Path | None:
        """Where tokenizer, chat template and generation config lie; None when nowhere."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it.

        Raises:
            KeyError: There is no tensor of that name.
        """

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it.

        Raises:
            KeyError: There is no tensor of that name.
        """

    def nbytes(self, name: str) -> int:
        """Size of a tensor's values in bytes, without reading it."""
        return torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize


class WrappedSource(TensorSource):
    """A source that shows another one differently; by itself, exactly as it is."""

    def __init__(self, source: TensorSource) -> None:
        self.path = source.path
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            KeyError: There is no tensor of that name.
        """
        return self._source[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, without reading it."""
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the source's order."""
        return iter(self._source)

    def __len__(self) -> int:
        """Count the tensors."""
        return sum(1 for _ in self)

    @property
    def config(self) -> dict[str, Any]:
        """Content of the model's `config.json`."""
        return self._source.config

    @property
    def asset_directory(self) -> Path | None:
        """Where tokenizer, chat template and generation config lie; None when nowhere."""
        return self._source.asset_directory

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""
        return self._source.dtype(name)


class ReadAhead(threading.local):
    """Tensors that a thread read together with another one and was not asked for yet."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, read: Callable[[], dict[str, Tensor]]) -> Tensor:
        """A tensor that was read before, or else one of what `read` gives."""
        if name not in self._tensors:
            self._tensors = read()
        return self._tensors.pop(name)


def config_in_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy of a `config.json` that names another dtype, under the key that it had."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


class CastSource(WrappedSource):
    """A source with every tensor rounded to one dtype, and a config that says so."""

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        """Wraps a source; `dtype` is a floating-point dtype of 16 or 32 bits."""
        super().__init__(source)
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor and round it.

        Raises:
            KeyError: There is no tensor of that name.
            ValueError: A finite value does not fit the dtype.
        """
        tensor = self._source[name]
        cast = tensor.to(self._dtype)
        if torch.finfo(self._dtype).max < torch.finfo(tensor.dtype).max:
            lost = ~cast.isfinite() & tensor.isfinite()
            if lost.any():
                raise ValueError(
                    f"{self.path} has {name} with {tensor[lost].abs().max():g}, which does not fit "
                    f"{self._dtype}; use bfloat16."
                )
        return cast

    def dtype(self, name: str) -> torch.dtype:
        """The dtype, for every tensor."""
        self._source.dtype(name)
        return self._dtype

    @property
    def config(self) -> dict[str, Any]:
        """Content of `config.json`, with the dtype."""
        return config_in_dtype(self._source.config, self._dtype)
