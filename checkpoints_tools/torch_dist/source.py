"""A Megatron checkpoint as a source of Hugging Face tensors.

`MegatronSource` is the mapping that the rest of the tools read: Hugging Face names, in model order,
each made from the part of the checkpoint that holds it. The parameter map says which; a fused
parameter is read once for all tensors that it holds, as long as they are asked for in order.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.source import ReadAhead, TensorSource
from checkpoints_tools.te_tensors import TETensor
from checkpoints_tools.torch_dist.keys import KeyMap, Location, is_model_key
from checkpoints_tools.torch_dist.reader import TorchDistReader
from megatron_rl.models import parameter_map
from megatron_rl.models.entry import ParameterEntry


class MegatronSource(TensorSource):
    """The tensors of a model in a `torch_dist` directory, by Hugging Face name, read when asked."""

    def __init__(
        self, path: Path | str, config: Mapping[str, Any], asset_directory: Path | None = None
    ) -> None:
        """Finds every tensor of the model, without reading any.

        Args:
            path: Directory with `.metadata` and `*.distcp`.
            config: Content of the model's `config.json`.
            asset_directory: Where its tokenizer, chat template and generation config lie.

        Raises:
            ValueError: The directory is damaged, or is not of the model that `config` describes.
        """
        self.path = Path(path)
        self._config = dict(config)
        self._asset_directory = asset_directory
        self.parameters = parameter_map(self._config)
        self._reader = TorchDistReader(self.path)
        keys = KeyMap(self.parameters)
        self._places: dict[str, Location] = {}
        self._entries: dict[str, ParameterEntry] = {}
        for entry in self.parameters:
            self._places[entry.megatron_name] = self._find(keys, entry)
            self._entries |= dict.fromkeys(entry.hf_names, entry)
        self._check_nothing_is_left()
        self._read_ahead = ReadAhead()

    def _find(self, keys: KeyMap, entry: ParameterEntry) -> Location:
        try:
            place = keys.find(entry, self._reader.__contains__)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        shape = list(entry.shape)
        if len(place.keys) == 2:
            shape[0] //= 2
        for key in place.keys:
            stored = list(self._reader.shape(key))
            expected = [*place.stack, *shape]
            fits = stored == expected
            if entry.kind == "vocab":  # padded at the end, to what Megatron needed
                fits = stored[0] >= expected[0] and stored[1:] == expected[1:]
            if not fits:
                raise ValueError(
                    f"{self.path} has {key} with shape {stored}, but the model config asks for "
                    f"{expected}: they are not of one model."
                )
        return place

    def _check_nothing_is_left(self) -> None:
        known = {key for place in self._places.values() for key in place.keys}
        if self.parameters.spec.tie_word_embeddings:
            known.add("output_layer.weight")
        # What norms are called in another layer spec, stored twice for the reader's convenience.
        twice = ".pre_mlp_layernorm.weight"
        left = [
            key
            for key in self._reader
            if is_model_key(key) and key not in known and not key.endswith(twice)
        ]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ValueError(
                f"{self.path} has {', '.join(left[:3])}{more}, which a "
                f"{self.parameters.spec.architecture} of this config does not have; give the "
                "config of the model that was trained."
            )

    def __getitem__(self, name: str) -> Tensor:
        """Reads one tensor; it may share memory with others of the same Megatron parameter.

        Raises:
            KeyError: There is no tensor of that name.
            ValueError: The file that holds it is damaged.
        """
        if name not in self._entries:
            raise KeyError(f"{self.path} has no tensor {name}")
        entry = self._entries[name]
        if entry.kind == "fused_gate_up":
            return self._half(entry, entry.hf_names.index(name))
        (key,) = self._places[entry.megatron_name].keys
        return self._read_ahead.take(
            name, lambda: entry.to_hf(self._read(entry, key, 0, entry.shape[0]))
        )

    def _half(self, entry: ParameterEntry, which: int) -> Tensor:
        """The gate or the up projection, without reading the other."""
        keys, rows = self._places[entry.megatron_name].keys, entry.shape[0] // 2
        key = keys[which] if len(keys) == 2 else keys[0]
        return self._read(entry, key, 0 if len(keys) == 2 else which * rows, rows)

    def _read(self, entry: ParameterEntry, key: str, first_row: int, rows: int) -> Tensor:
        offsets, sizes = self._box(entry, first_row, rows)
        return self._reader.read(key, offsets, sizes).reshape(rows, *entry.shape[1:])

    def _box(
        self, entry: ParameterEntry, first_row: int, rows: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of rows of a parameter, in the tensor that its layers share."""
        index, inner = self._places[entry.megatron_name].index, entry.shape[1:]
        offsets = (*index, first_row, *(0 for _ in inner))
        return offsets, (*(1 for _ in index), rows, *inner)

    def is_quantised(self, entry: ParameterEntry) -> bool:
        """Whether a parameter is stored as FP8 codes."""
        key = self._places[entry.megatron_name].keys[0]
        return self._reader.is_quantised(key, *self._box(entry, 0, 1))

    def shards(self, entry: ParameterEntry) -> list[Tensor | TETensor]:
        """What tensor-parallel ranks stored of a parameter, in rank order.

        Raises:
            ValueError: The file that holds it is damaged.
        """
        (key,) = self._places[entry.megatron_name].keys
        return self._reader.stored(key, *self._box(entry, 0, entry.shape[0]))

    def was_dequantised(self, entry: ParameterEntry) -> bool:
        """Whether megatron-core dequantised a parameter when it saved.

        It cuts the fused gate and up in halves, and a cut makes values of Transformer Engine's
        codes. The down projection beside it tells.
        """
        if entry.kind != "fused_gate_up" or self.is_quantised(entry):
            return False
        down = entry.megatron_name.replace("linear_fc1", "linear_fc2")
        return self.is_quantised(self.parameters.entry(down))

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, without reading it."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in model order."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._entries)

    @property
    def config(self) -> dict[str, Any]:
        """Content of the model's `config.json`."""
        return self._config

    @property
    def asset_directory(self) -> Path | None:
        """Where tokenizer, chat template and generation config lie."""
        return self._asset_directory

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the index."""
        return self.parameters.hf_shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the index."""
        return self._reader.dtype(self._places[self._entries[name].megatron_name].keys[0])

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Keys of tensors that are not weights: the optimizer's."""
        return tuple(key for key in self._reader if not is_model_key(key))
