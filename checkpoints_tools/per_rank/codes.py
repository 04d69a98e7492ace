"""The FP8 codes of a checkpoint with one file a rank, as vLLM reads them, untouched.

Blocks lie over Megatron's fused matrix of each rank. They can be given to the Hugging Face tensors
that the matrix holds exactly where every boundary, between ranks and between fused parts, is one
between blocks; then rows of scales are permuted as the rows of codes that they belong to. Where it
is not, and where ranks scaled their parts of a tensor differently while vLLM takes one scale, the
codes cannot be kept, and the checkpoint is refused before anything is written.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.per_rank.source import PerRankSource
from checkpoints_tools.source import ReadAhead, TensorSource, WrappedSource
from checkpoints_tools.te_tensors import TETensor
from megatron_rl.models import linear_shapes
from megatron_rl.models.entry import ParameterEntry
from megatron_rl.precision import LinearPlan, partition_violations, resolve_flow
from megatron_rl.precision.partition import BLOCK, Exemption
from megatron_rl.precision.wire import quantization_config, scale_name

_REMEDY = "give --requantize to quantise the values anew, or --format hf to write them"


def codes_of(source: TensorSource, *, tp_size: int = 1) -> TensorSource:
    """A source with its codes shown, where it has any.

    Args:
        source: Any source.
        tp_size: Tensor-parallel size that the codes must allow.

    Raises:
        ValueError: They cannot be kept, see `PerRankCodes`.
    """
    if not isinstance(source, PerRankSource):
        return source
    quantised = any(isinstance(source.shards(e)[0], TETensor) for e in source.parameters)
    return PerRankCodes(source, tp_size=tp_size) if quantised else source


class PerRankCodes(WrappedSource):
    """Codes and scales of the weights that are stored in FP8, and all other tensors as they are."""

    def __init__(self, source: PerRankSource, *, tp_size: int = 1) -> None:
        """Finds out which weights are quantised, and whether their codes can be kept.

        Args:
            source: Checkpoint with FP8 weights.
            tp_size: Tensor-parallel size that the result must allow.

        Raises:
            ValueError: Codes are not in E4M3, some weights have a scale a block and others one,
                blocks cannot be cut at the boundaries of ranks and tensors, ranks scaled their
                parts differently, or a layer's experts are quantised in part.
        """
        super().__init__(source)
        self._ranks = source
        self._quantised: dict[str, ParameterEntry] = {}
        kinds: dict[bool, ParameterEntry] = {}
        for entry in source.parameters:
            shard = source.shards(entry)[0]
            if not isinstance(shard, TETensor):
                continue
            if shard.codes.dtype != torch.float8_e4m3fn:
                raise ValueError(
                    f"{self.path} has {entry.megatron_name} in {shard.codes.dtype}, and vLLM "
                    f"reads torch.float8_e4m3fn; {_REMEDY}."
                )
            kinds.setdefault(shard.is_block_scaled, entry)
            self._quantised |= dict.fromkeys(entry.hf_names, entry)
        if len(kinds) != 1:
            names = " and ".join(entry.megatron_name for entry in kinds.values()) or "nothing"
            raise ValueError(
                f"{self.path} has {names} quantised in different ways, and vLLM knows one a model; "
                f"{_REMEDY}."
            )
        self._is_block_scaled = next(iter(kinds))
        self.plan = self._plan()
        if self._is_block_scaled:
            self._check_blocks(tp_size)
        else:
            self._check_scales()
        self._read_ahead = ReadAhead()

    def _plan(self) -> LinearPlan:
        shapes = linear_shapes(self._ranks.parameters)
        stored = {entry.megatron_name for entry in self._quantised.values()}
        quantised = [shape for shape in shapes if f"{shape.name}.weight" in stored]
        exempt = [shape for shape in shapes if f"{shape.name}.weight" not in stored]
        groups = {shape.together for shape in quantised if shape.together}
        if mixed := [shape for shape in exempt if shape.together in groups]:
            raise ValueError(
                f"{self.path} has {mixed[0].name} unquantised beside experts in FP8, and vLLM "
                f"holds the experts of a layer alike; {_REMEDY}."
            )
        reason = "not quantised in the checkpoint"
        return LinearPlan(
            quantised=tuple(quantised),
            exempt=tuple(Exemption(shape=shape, reason=reason) for shape in exempt),
        )

    def _check_blocks(self, tp_size: int) -> None:
        saved = self._ranks.tp_size
        problems = partition_violations(self.plan, train_tp=saved, rollout_tp=tp_size)
        if problems:
            raise ValueError(f"{self.path}: {problems[0]}; {_REMEDY}.")

    def _check_scales(self) -> None:
        for entry in dict.fromkeys(self._quantised.values()):
            scales = [_quantised(shard).scale_inv for shard in self._ranks.shards(entry)]
            if any(not torch.equal(scale, scales[0]) for scale in scales):
                listing = ", ".join(f"{float(scale):.6g}" for scale in scales)
                raise ValueError(
                    f"{self.path} has {entry.megatron_name} with another scale on each of its "
                    f"{len(scales)} tensor-parallel ranks ({listing}), and vLLM takes one a "
                    f"tensor; {_REMEDY}."
                )

    def _scale_name(self, name: str) -> str:
        return scale_name(name) if self._is_block_scaled else f"{name}_scale"

    def _parts(self, entry: ParameterEntry) -> dict[str, Tensor]:
        """Codes and scales of the Hugging Face tensors that a parameter holds."""
        shards = [_quantised(shard) for shard in self._ranks.shards(entry)]
        codes = entry.unshard([shard.codes.view(torch.uint8) for shard in shards])
        parts = {n: t.view(torch.float8_e4m3fn) for n, t in entry.to_hf(codes).items()}
        if not self._is_block_scaled:
            scale = shards[0].scale_inv.reshape(())
            return parts | {self._scale_name(name): scale.clone() for name in entry.hf_names}
        # A layout moves whole rows, and does not ask whether they are of codes or of blocks.
        scales = entry.layout.split(
            entry.layout.unshard([shard.scale_inv for shard in shards]).contiguous()
        )
        for name, scale in zip(entry.hf_names, scales, strict=True):
            assert tuple(scale.shape) == self.shape(self._scale_name(name)), name
            parts[self._scale_name(name)] = scale
        return parts

    def _weight_of(self, name: str) -> str | None:
        """The weight whose scales a name is."""
        suffix = self._scale_name("")
        weight = name.removesuffix(suffix)
        return weight if name.endswith(suffix) and weight in self._quantised else None

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            KeyError: There is no tensor of that name.
        """
        entry = self._quantised.get(self._weight_of(name) or name)
        if entry is None:
            return self._source[name]
        return self._read_ahead.take(name, lambda: self._parts(entry))

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, without reading it."""
        return name in self._source or (isinstance(name, str) and self._weight_of(name) is not None)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in model order; scales follow their weight."""
        for name in self._source:
            yield name
            if name in self._quantised:
                yield self._scale_name(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        weight = self._weight_of(name)
        if weight is None:
            return self._source.shape(name)
        if not self._is_block_scaled:
            return ()
        rows, columns = self._source.shape(weight)
        return (-(-rows // BLOCK), -(-columns // BLOCK))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""
        if self._weight_of(name) is not None:
            return torch.float32
        return torch.float8_e4m3fn if name in self._quantised else self._source.dtype(name)

    @property
    def config(self) -> dict[str, Any]:
        """Content of `config.json`, with the `quantization_config` that vLLM needs."""
        if self._is_block_scaled:
            quantization = quantization_config(resolve_flow("fp8"), self.plan)
        else:
            quantization = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "modules_to_not_convert": ["lm_head", *self.plan.exempt_hf_modules],
            }
        return {**self._source.config, "quantization_config": quantization}


def _quantised(shard: Any) -> TETensor:
    assert isinstance(shard, TETensor)
    return shard
