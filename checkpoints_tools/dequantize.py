"""Values from FP8 codes and scales.

Three ways of naming and shaping scales are in use, all read here; a value is code times scale,
rounded once:

- DeepSeek's and this project's block FP8: `X.weight_scale_inv`, one number a block;
- per tensor and per channel, as vLLM and compressed-tensors write: `X.weight_scale` with one
  number, or one a row;
- compressed-tensors' block strategy: `X.weight_scale`, one number a block.

Packed integers and FP4 are refused rather than guessed. Static scales of activations and of a KV
cache say nothing about weights and are left out.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoints_tools.source import TensorSource, WrappedSource, config_in_dtype

_SUFFIXES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")


class DequantizedSource(WrappedSource):
    """A quantised source as values; its config has no `quantization_config`."""

    def __init__(self, source: TensorSource, dtype: torch.dtype = torch.bfloat16) -> None:
        """Pairs every FP8 weight with its scales, without reading any.

        Args:
            source: A model with FP8 weights.
            dtype: Of the values; tensors that are not quantised keep theirs.

        Raises:
            ValueError: A weight has no scales, scales have no weight, or shape or dtype of scales
                are wrong.
        """
        super().__init__(source)
        self._target = dtype
        self._block = _block_shape(source.config.get("quantization_config") or {})
        self._scales: dict[str, str] = {}
        for name in source:
            if source.dtype(name) not in (torch.float8_e4m3fn, torch.float8_e5m2):
                continue
            found = [name + suffix for suffix in _SUFFIXES if name + suffix in source]
            if len(found) != 1:
                raise ValueError(
                    f"{source.path} has {name} in FP8 with {len(found)} sets of scales; expected "
                    f"one of {name}_scale_inv and {name}_scale."
                )
            self._scales[name] = found[0]
            self._check(name, found[0])
        if not self._scales:
            raise ValueError(f"{source.path} has no FP8 weights; there is nothing to dequantize.")
        used = set(self._scales.values())
        for name in source:
            if name.endswith(_SUFFIXES) and name not in used and not name.endswith(_OF_ACTIVATIONS):
                raise ValueError(f"{source.path} has {name}, but no FP8 weight that it belongs to.")

    def _check(self, name: str, scale: str) -> None:
        dtype = self._source.dtype(scale)
        # BF16 scales lose 16 bits: a checkpoint that was cast by accident, and not what ran.
        if dtype != torch.float32 and (scale.endswith("_scale_inv") or dtype != torch.bfloat16):
            raise ValueError(
                f"{self.path} has {scale} in {dtype}, expected torch.float32: it was cast after "
                "quantising; convert the original again."
            )
        shape, given = self._source.shape(name), self._source.shape(scale)
        if len(shape) != 2:
            raise ValueError(f"{self.path} has {name} in FP8 with shape {list(shape)}; expected 2.")
        blocks = self._blocks(shape)
        allowed = [blocks] if blocks else []
        if scale.endswith("_scale"):
            allowed += [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
        if given not in allowed:
            wanted = " or ".join(str(list(item)) for item in allowed) or "a weight_block_size"
            raise ValueError(
                f"{self.path} has {scale} with shape {list(given)}, but {name} is {list(shape)}: "
                f"expected {wanted}."
            )

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        if self._block is None:
            return None
        rows, columns = self._block
        return (-(-shape[0] // rows), -(-shape[1] // columns))

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor as values.

        Raises:
            KeyError: There is no tensor of that name.
            ValueError: A scale is not a finite number above zero.
        """
        if name not in self._scales:
            if name not in self:
                raise KeyError(f"{self.path} has no tensor {name}")
            return self._source[name]
        codes, stored = self._source[name], self._source[self._scales[name]]
        scales = stored.float()
        if not (scales.isfinite() & (scales > 0)).all():
            raise ValueError(
                f"{self.path} has {self._scales[name]} with a scale that is not a finite number "
                "above zero; get the checkpoint again."
            )
        if tuple(scales.shape) == self._blocks(tuple(codes.shape)):
            from megatron_rl.precision import dequantize_block

            assert self._block is not None
            return dequantize_block(codes, scales, self._block, self._target)
        per_row = scales.reshape(-1, 1)  # one a row, or one for all
        return (codes.float() * per_row).to(self._target)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, which is no scale."""
        return isinstance(name, str) and name in self._source and not _is_scale(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, without those of scales."""
        return (name for name in self._source if not _is_scale(name))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the values."""
        return self._target if name in self._scales else self._source.dtype(name)

    @property
    def config(self) -> dict[str, Any]:
        """Content of `config.json` without `quantization_config`."""
        config = config_in_dtype(self._source.config, self._target)
        config.pop("quantization_config", None)
        return config


def is_weight_scale(name: str) -> bool:
    """Whether a tensor holds the scales of an FP8 weight, by its name."""
    return name.endswith(tuple(".weight" + suffix for suffix in _SUFFIXES))


def _is_scale(name: str) -> bool:
    return is_weight_scale(name) or name.endswith(_OF_ACTIVATIONS)


def _block_shape(config: dict[str, Any]) -> tuple[int, int] | None:
    """Block of a `quantization_config`, None when scales are per tensor or per channel.

    Raises:
        ValueError: The method is not FP8.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        groups = list((config.get("config_groups") or {}).values())
        weights = [group.get("weights") or {} for group in groups]
        if not all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights):
            raise ValueError(
                "only FP8 weights of compressed-tensors are read, not integers or FP4."
            )
        shapes = {tuple(w["block_structure"]) for w in weights if w.get("block_structure")}
        if len(shapes) > 1:
            raise ValueError(f"compressed-tensors groups have different blocks: {sorted(shapes)}.")
        return _pair(shapes.pop()) if shapes else None
    if method not in ("fp8", None):
        raise ValueError(
            f"quant_method {method!r} is not read; expected 'fp8' or 'compressed-tensors' (FP8)."
        )
    return _pair(config["weight_block_size"]) if config.get("weight_block_size") else None


def _pair(values: Any) -> tuple[int, int]:
    rows, columns = values
    return int(rows), int(columns)
