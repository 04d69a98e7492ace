"""What a checkpoint holds, from headers only: for a table, or as JSON."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from checkpoints_tools.dequantize import is_weight_scale
from checkpoints_tools.progress import format_bytes
from checkpoints_tools.source import TensorSource
from megatron_rl.precision.scaling import powers_of_two


def summarise(source: TensorSource, *, with_scales: bool = False) -> dict[str, Any]:
    """Names, shapes, dtypes and sizes of a model.

    Args:
        source: The model.
        with_scales: Read the FP8 scales and give their smallest and largest value.

    Returns:
        Plain JSON values.
    """
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": list(source.shape(name)),
            "dtype": str(source.dtype(name)).removeprefix("torch."),
            "bytes": source.nbytes(name),
        }
        for name in source
    ]
    if with_scales:
        for tensor in tensors:
            if is_weight_scale(tensor["name"]):
                values = source[tensor["name"]].float()
                tensor["min"], tensor["max"] = float(values.min()), float(values.max())
                tensor["power_of_two"] = powers_of_two(values)
    config = source.config
    parameters = sum(math.prod(t["shape"]) for t in tensors if not is_weight_scale(t["name"]))
    return {
        "path": str(source.path),
        "architecture": (config.get("architectures") or [None])[0],
        "layers": config.get("num_hidden_layers"),
        "parameters": parameters,
        "bytes": sum(t["bytes"] for t in tensors),
        "dtypes": dict(Counter(t["dtype"] for t in tensors)),
        "flow": "fp8" if any(t["dtype"] == "float8_e4m3fn" for t in tensors) else "unquantised",
        "quantization_config": config.get("quantization_config"),
        "tensors": tensors,
    }


def table(summary: dict[str, Any]) -> Iterator[str]:
    """The lines of a table of the summary."""
    yield (
        f"{summary['path']}: {summary['architecture']}, {summary['layers']} layers, "
        f"{summary['parameters']:,} parameters, {format_bytes(summary['bytes'])}"
    )
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in summary["dtypes"].items())
    yield f"{len(summary['tensors'])} tensors: {kinds}; {summary['flow']}"
    width = max((len(t["name"]) for t in summary["tensors"]), default=0)
    for t in summary["tensors"]:
        line = f"{t['name']:{width}}  {t['dtype']:14} {'x'.join(map(str, t['shape']))}"
        if "min" in t:
            kind = "powers of two" if t["power_of_two"] else "any"
            line += f"  {t['min']:.4g} to {t['max']:.4g} ({kind})"
        yield line
