"""Checkpoints with a file a rank, as Megatron-LM writes them, made from a Hugging Face directory.

Transformer Engine's tensors are pickled as TE pickles them (2.3 to 2.20, read from its sources) by
classes of the same names, which exist while a file is written and no longer.
"""

import argparse
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.hf import HFReader
from megatron_rl.models import parameter_map
from megatron_rl.models.entry import ParameterEntry
from megatron_rl.precision import quantize_block

JUNK = float("nan")
"""What the padding of scales holds; on a device, whatever was there before."""
_TENSOR = "transformer_engine.pytorch.tensor"
_BLOCK, _SCALED = f"{_TENSOR}.float8_blockwise_tensor", f"{_TENSOR}.float8_tensor"
_E4M3 = 7
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

Convert = Callable[[ParameterEntry, Tensor, int], Any]
"""What is stored of a shard, from the entry, the shard and its tensor-parallel rank."""


class _Pickled:
    """Anything that pickles as a call of a function of another module."""

    def __init__(self, maker: Callable, *arguments: Any) -> None:
        self.reduced = (maker, arguments)

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.reduced


def _make_in_reduce_ex(cls: type, *arguments: Any) -> None:
    raise AssertionError("nothing is unpickled here")


@contextmanager
def te_modules(*, old: bool = False) -> Iterator[types.SimpleNamespace]:
    """Stand-ins under TE's names; `old` as versions before 2.19 pickle."""
    names = (_BLOCK, _SCALED, "transformer_engine_torch", "transformer_engine.pytorch.constants")
    names += ("transformer_engine", "transformer_engine.pytorch", _TENSOR)
    modules = {name: types.ModuleType(name) for name in names}

    def declare(module: str, name: str) -> Any:
        def maker(*arguments: Any) -> None:
            raise AssertionError("nothing is unpickled here")

        made: Any = maker if name.startswith("_make") else type(name, (), {})
        made.__module__, made.__name__, made.__qualname__ = module, name, name
        setattr(modules[module], name, made)
        return made

    for module, cls, function in (
        (_BLOCK, "Float8BlockwiseQTensor", "_make_float8_blockwise_tensor_in_reduce_ex"),
        (_SCALED, "Float8Tensor", "_make_float8_tensor_in_reduce_ex"),
    ):
        declare(module, function)
        declare(module, cls)._make_in_reduce_ex = classmethod(_make_in_reduce_ex)
    for module in names[2:4]:
        declare(module, "DType").__init__ = lambda self, value: None
    declare(_BLOCK, "Float8BlockQuantizer")
    dtype = modules["transformer_engine_torch" if old else "transformer_engine.pytorch.constants"]
    block, scaled = modules[_BLOCK], modules[_SCALED]
    sys.modules.update(modules)
    try:
        yield types.SimpleNamespace(
            block=block.Float8BlockwiseQTensor._make_in_reduce_ex
            if old
            else block._make_float8_blockwise_tensor_in_reduce_ex,
            scaled=scaled.Float8Tensor._make_in_reduce_ex
            if old
            else scaled._make_float8_tensor_in_reduce_ex,
            dtype=_Pickled(dtype.DType, _E4M3),
            quantizer=block.Float8BlockQuantizer(),
        )
    finally:
        for name in names:
            del sys.modules[name]


def block_tensor(te: Any, shard: Tensor, *, columnwise_only: bool = False) -> Any:
    """A shard as a `Float8BlockwiseQTensor`."""

    def side(matrix: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale_inv = quantize_block(matrix, (128, 128), "pow2", torch.float8_e4m3fn)
        padded = torch.nn.functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4), value=JUNK)
        return codes.view(torch.uint8), padded

    row = (None, None) if columnwise_only else side(shard)
    column = side(shard.t().contiguous())
    quantiser = te.quantizer
    arguments = (shard.shape, *row, *column, te.dtype, shard.dtype, quantiser, True)
    return _Pickled(te.block, *arguments)


def scaled_tensor(te: Any, shard: Tensor, scale_inv: float) -> Any:
    """A shard as a `Float8Tensor`."""
    codes = (shard.float() / scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return _Pickled(te.scaled, codes, te.dtype, torch.tensor([scale_inv]), shard.dtype, shard.shape)


def write_ranks(
    source: Path,
    target: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    convert: Convert = lambda entry, shard, rank: shard,
    **extra: Any,
) -> Path:
    """Writes `iter_0000005` and its tracker; `extra` goes into every file."""
    reader = HFReader(source)
    parameters = parameter_map(reader.config, make_vocab_size_divisible_by=64)
    num_layers = parameters.spec.num_layers // pp
    args = argparse.Namespace(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, swiglu=True
    )
    for rank in range(tp):
        for stage in range(pp):
            model: dict[str, Any] = {}
            for entry in parameters:
                on = _stage(entry, num_layers, pp)
                shard = entry.shard(entry.to_megatron(reader), tp_rank=rank, tp_size=tp).clone()
                if on == stage:
                    model[_te_name(entry, num_layers)] = convert(entry, shard, rank)
                tied = entry.tied_hf_name is not None
                if tied and pp > 1 and stage == pp - 1:
                    model["output_layer.weight"] = shard
            model["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.empty(0)
            suffix = f"_{stage:03d}" if pp > 1 else ""
            folder = target / "iter_0000005" / f"mp_rank_{rank:02d}{suffix}"
            folder.mkdir(parents=True)
            torch.save({"args": args, "model": model, **extra}, folder / "model_optim_rng.pt")
    (target / "latest_checkpointed_iteration.txt").write_text("5")
    return target


def _stage(entry: ParameterEntry, num_layers: int, pp: int) -> int:
    if entry.layer is not None:
        return entry.layer // num_layers
    return 0 if entry.megatron_name.startswith("embedding") else pp - 1


def _te_name(entry: ParameterEntry, num_layers: int) -> str:
    """The name in a rank's file: local layer, TE's fused norms, grouped experts."""
    if entry.layer is None:
        return entry.megatron_name
    rest = entry.megatron_name.split(".", 3)[3]
    rest = _NORMS.get(rest, rest)
    rest = re.sub(r"local_experts\.(\d+)\.(linear_fc.)\.weight", r"\2.weight\1", rest)
    return f"decoder.layers.{entry.layer % num_layers}.{rest}"
