"""The FP8 codes of a Megatron checkpoint, as vLLM reads them, untouched.

Blocks lie over Megatron's fused matrix of each rank. They can be given to the Hugging Face tensors
that the matrix holds exactly where every boundary, between ranks and between fused parts, is one
between blocks; then rows of scales are permuted as the rows of codes that they belong to. Where it
is not, and where ranks scaled their parts of a tensor differently while vLLM takes one scale, the
codes cannot be kept, and the checkpoint is refused before anything is written.

In `torch_dist` the fused gate and up are there as values: megatron-core cuts them in halves when it
saves, and Transformer Engine answers a cut with BF16. With scales that are powers of two these are
exactly the codes' values, and quantising them gives weights of exactly these values again. (Not
always the same bytes: where rounding took a block's largest code to 224, half the scale and twice
the codes say the same.) With other scales BF16 has rounded them, and the checkpoint is refused.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.per_rank import PerRankSource
from checkpoints_tools.source import ReadAhead, TensorSource, WrappedSource
from checkpoints_tools.te_tensors import BLOCK, TETensor
from checkpoints_tools.torch_dist import MegatronSource
from megatron_rl.models import linear_shapes
from megatron_rl.models.entry import ParameterEntry
from megatron_rl.precision import LinearPlan, partition_violations, resolve_flow
from megatron_rl.precision.partition import Exemption
from megatron_rl.precision.scaling import powers_of_two
from megatron_rl.precision.wire import encode, quantization_config, scale_name

_REMEDY = "give --requantize to quantise the values anew, or --format hf to write them"
_FLOW = "fp8"


def codes_of(source: TensorSource, *, tp_size: int = 1) -> TensorSource:
    """A source with its codes shown, where it has any.

    Args:
        source: Any source.
        tp_size: Tensor-parallel size that the codes must allow.

    Raises:
        ValueError: They cannot be kept, see `CodesSource`.
    """
    if isinstance(source, PerRankSource | MegatronSource):
        linears = [entry for entry in source.parameters if _is_linear(entry)]
        if any(map(source.is_quantised, linears)):
            return CodesSource(source, tp_size=tp_size)
    return source


class CodesSource(WrappedSource):
    """Codes and scales of the weights that are stored in FP8, and all other tensors as they are."""

    def __init__(self, source: PerRankSource | MegatronSource, *, tp_size: int = 1) -> None:
        """Finds out which weights are quantised, and whether their codes can be kept.

        Args:
            source: Checkpoint with FP8 weights.
            tp_size: Tensor-parallel size that the result must allow.

        Raises:
            ValueError: Codes are not in E4M3, some weights have a scale a block and others one,
                blocks cannot be cut at the boundaries of ranks and tensors, ranks scaled their
                parts differently, a layer's experts are quantised in part, or values that were
                dequantised on saving have lost their codes.
        """
        super().__init__(source)
        self._megatron = source
        linears = [entry for entry in source.parameters if _is_linear(entry)]
        self._stored = {e.megatron_name: e for e in linears if source.is_quantised(e)}
        self._dequantised = {e.megatron_name: e for e in linears if source.was_dequantised(e)}
        self._quantised = {
            name: entry
            for entry in (*self._stored.values(), *self._dequantised.values())
            for name in entry.hf_names
        }
        self.plan = self._plan()
        saved_tp = self._check_shards()
        if self._is_block_scaled:
            problems = partition_violations(self.plan, train_tp=saved_tp, rollout_tp=tp_size)
            if problems:
                raise ValueError(f"{self.path}: {problems[0]}; {_REMEDY}.")
        self._read_ahead = ReadAhead()

    def _plan(self) -> LinearPlan:
        shapes = linear_shapes(self._megatron.parameters)
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

    def _check_shards(self) -> int:
        """Checks codes and scales against what vLLM reads; says over how many ranks they lie."""
        kinds: dict[bool, str] = {}
        tp_size, all_powers = 1, True
        for name, entry in self._stored.items():
            shards = self._shards(entry)
            tp_size = max(tp_size, len(shards))
            for shard in shards:
                kinds.setdefault(shard.is_block_scaled, name)
                if shard.codes.dtype != torch.float8_e4m3fn:
                    raise ValueError(
                        f"{self.path} has {name} in {shard.codes.dtype}, and vLLM reads "
                        f"torch.float8_e4m3fn; {_REMEDY}."
                    )
                if not (shard.scale_inv.isfinite() & (shard.scale_inv > 0)).all():
                    raise ValueError(
                        f"{self.path} has scales of {name} that are not finite numbers above "
                        "zero: the weights are lost; take another checkpoint."
                    )
                all_powers = all_powers and powers_of_two(shard.scale_inv)
            if not shards[0].is_block_scaled:
                self._check_one_scale(name, [shard.scale_inv for shard in shards])
        if len(kinds) != 1:
            raise ValueError(
                f"{self.path} has {' and '.join(kinds.values())} scaled in different ways, and "
                f"vLLM knows one a model; {_REMEDY}."
            )
        (self._is_block_scaled,) = kinds
        if self._dequantised and not (self._is_block_scaled and all_powers):
            raise ValueError(
                f"{self.path} has {next(iter(self._dequantised))} in BF16, dequantised when it was "
                f"saved, and its codes cannot be told from its values; {_REMEDY}."
            )
        return tp_size

    def _check_one_scale(self, name: str, scales: list[Tensor]) -> None:
        if any(not torch.equal(scale, scales[0]) for scale in scales):
            listing = ", ".join(f"{float(scale):.6g}" for scale in scales)
            raise ValueError(
                f"{self.path} has {name} with another scale on each of its {len(scales)} "
                f"tensor-parallel ranks ({listing}), and vLLM takes one a tensor; {_REMEDY}."
            )

    def _shards(self, entry: ParameterEntry) -> list[TETensor]:
        shards = self._megatron.shards(entry)
        assert all(isinstance(shard, TETensor) for shard in shards), entry.megatron_name
        return shards  # type: ignore[return-value]

    @property
    def notes(self) -> list[str]:
        """What a user should know of the codes, a line each."""
        lines = [f"codes and scales as stored: {self.plan.summary()}"]
        if self._dequantised:
            lines.append(
                f"{len(self._dequantised)} of them ({next(iter(self._dequantised))}, ...) were "
                "saved as values, which are quantised to codes of the same values"
            )
        return lines

    def _scale_name(self, name: str) -> str:
        return scale_name(name) if self._is_block_scaled else f"{name}_scale"

    def _parts(self, entry: ParameterEntry) -> dict[str, Tensor]:
        """Codes and scales of the Hugging Face tensors that a parameter holds."""
        if entry.megatron_name in self._dequantised:
            flow = resolve_flow(_FLOW)
            values = {name: self._source[name] for name in entry.hf_names}
            return dict(p for n, t in values.items() for p in encode(n, t, flow, self.plan))
        shards = self._shards(entry)
        codes = entry.unshard([shard.codes.view(torch.uint8) for shard in shards])
        parts = {n: t.view(torch.float8_e4m3fn) for n, t in entry.to_hf(codes).items()}
        if not self._is_block_scaled:
            scale = shards[0].scale_inv.reshape(())
            return parts | {self._scale_name(name): scale.clone() for name in entry.hf_names}
        # A layout moves whole rows, and does not ask whether they are of codes or of blocks.
        scales = entry.layout.unshard([shard.scale_inv for shard in shards]).contiguous()
        for name, scale in zip(entry.hf_names, entry.layout.split(scales), strict=True):
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
            quantization = quantization_config(resolve_flow(_FLOW), self.plan)
        else:
            quantization = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "modules_to_not_convert": ["lm_head", *self.plan.exempt_hf_modules],
            }
        return {**self._source.config, "quantization_config": quantization}


def _is_linear(entry: ParameterEntry) -> bool:
    return entry.layer is not None and len(entry.shape) == 2 and entry.kind != "replicated"
