"""The values of a checkpoint with one file a rank, by Hugging Face name.

Weights that are stored as FP8 codes are shown as what they stand for; `codes.CodesSource` shows
the codes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.per_rank.files import Stored, read_ranks
from checkpoints_tools.source import ReadAhead, TensorSource
from checkpoints_tools.te_tensors import TETensor
from megatron_rl.models import parameter_map
from megatron_rl.models.entry import ParameterEntry


class PerRankSource(TensorSource):
    """A model whose ranks each wrote a file, put together tensor by tensor."""

    def __init__(
        self, path: Path | str, config: Mapping[str, Any], asset_directory: Path | None = None
    ) -> None:
        """Maps all files and finds every parameter, without reading any.

        Args:
            path: Directory with `mp_rank_*`.
            config: Content of the model's `config.json`.
            asset_directory: Where its tokenizer, chat template and generation config lie.

        Raises:
            ValueError: A file is missing or damaged, or the weights are not of that model.
        """
        self.path = Path(path)
        self._config = dict(config)
        self._asset_directory = asset_directory
        self.parameters = parameter_map(self._config)
        self._ranks = read_ranks(self.path)
        try:
            self.parameters.check_tp(self.tp_size)
            self.parameters.check_megatron_keys(self._ranks.by_tp_rank[0])
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        self._entries: dict[str, ParameterEntry] = {}
        for entry in self.parameters:
            self._check(entry)
            self._entries |= dict.fromkeys(entry.hf_names, entry)
        self._read_ahead = ReadAhead()

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size at which the checkpoint was saved."""
        return self._ranks.tp_size

    def shards(self, entry: ParameterEntry) -> list[Stored]:
        """What the tensor-parallel ranks stored of a parameter, in rank order."""
        return [held[entry.megatron_name] for held in self._ranks.by_tp_rank]

    def is_quantised(self, entry: ParameterEntry) -> bool:
        """Whether a parameter is stored as FP8 codes."""
        return isinstance(self.shards(entry)[0], TETensor)

    def was_dequantised(self, entry: ParameterEntry) -> bool:
        """Whether a parameter was dequantised when it was saved: in this format, none is."""
        return False

    def _check(self, entry: ParameterEntry) -> None:
        first, *_ = shards = self.shards(entry)
        rows = sum(shard.shape[0] for shard in shards)
        expected = entry.shard_shape(self.tp_size)
        for rank, shard in enumerate(shards):
            fits = tuple(shard.shape) == expected
            if entry.kind == "vocab":  # padded to what the run that saved it asked for
                fits = tuple(shard.shape[1:]) == expected[1:] and rows >= entry.shape[0]
            if not fits or shard.dtype != first.dtype or type(shard) is not type(first):
                raise ValueError(
                    f"{self.path} has {entry.megatron_name} as {_short(shard)} on tensor-parallel "
                    f"rank {rank}, but rank 0 has {_short(first)} and the model config asks for "
                    f"{list(expected)}: they are not of one model."
                )

    def values(self, entry: ParameterEntry) -> Tensor:
        """A full parameter, dequantised shard by shard."""
        shards = [s.dequantize() if isinstance(s, TETensor) else s for s in self.shards(entry)]
        try:
            return entry.unshard(shards)
        except ValueError as error:
            raise ValueError(f"{self.path}, {entry.megatron_name}: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        """Reads one tensor; it may share memory with others of the same Megatron parameter.

        Raises:
            KeyError: There is no tensor of that name.
            ValueError: Ranks that should hold the same values do not.
        """
        if name not in self._entries:
            raise KeyError(f"{self.path} has no tensor {name}")
        entry = self._entries[name]
        return self._read_ahead.take(name, lambda: entry.to_hf(self.values(entry)))

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
        """Shape of a tensor, without reading it."""
        return self.parameters.hf_shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor's values, without reading it."""
        return self.shards(self._entries[name])[0].dtype


def _short(shard: Stored) -> str:
    kind = "FP8 codes for " if isinstance(shard, TETensor) else ""
    return f"{kind}{shard.dtype} {list(shard.shape)}"
