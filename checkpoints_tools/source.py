"""The interface through which every command reads a model.

A `TensorSource` is a lazy mapping by Hugging Face name. It knows names, shapes and dtypes from
headers, so that a conversion is planned, checked and priced before the first tensor is read, and it
reads a tensor only when it is asked for it, so that models larger than memory pass through.
"""

from abc import abstractmethod
from collections.abc import Mapping
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
