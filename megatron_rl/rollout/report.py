"""What a live vLLM model computes, for the audit (:mod:`megatron_rl.precision.audit`).

Formats, kernels and operands are read from the modules after vLLM's own post-processing. vLLM packs
an unquantised weight for the CPU and throws the original away; such a weight is read back through
the layer itself, as its output for the identity matrix.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_rl.platforms import current_platform
from megatron_rl.precision import BlockFormat, format_str
from megatron_rl.precision.audit import ModelReport, Operand
from megatron_rl.precision.digests import canonical, digest
from megatron_rl.precision.kernels import SERVING_KERNEL, deep_gemm_input_format
from megatron_rl.precision.quantize import dequantize_block
from megatron_rl.precision.scaling import powers_of_two
from megatron_rl.rollout.shared_operators import live_operators

READBACK_LIMIT = 2 * 10**11
"""Multiplications up to which a packed weight is read back."""


def describe_model(model_runner: Any) -> ModelReport:
    """Reads a worker's model. At rollout TP 1 operands carry digests."""
    model = model_runner.get_model()
    parallel = model_runner.vllm_config.parallel_config
    whole = parallel.tensor_parallel_size == 1
    vocabulary = model_runner.vllm_config.model_config.get_vocab_size()
    linears = dict(_linears(model, vocabulary, whole))
    # Operators are shared on a CPU only.
    shared = live_operators(model_runner) if current_platform().name == "cpu" else ()
    return ModelReport(linears=linears, shared_operators=shared)


def _linears(model: torch.nn.Module, vocabulary: int, whole: bool) -> Iterator[tuple[str, Operand]]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        if isinstance(layer, ParallelLMHead):
            yield name, _plain(layer, [vocabulary], whole)[0]
        elif isinstance(layer, LinearBase):
            parent, _, own = name.rpartition(".")
            modules = [f"{parent}.{part}" for part in packed.get(own, [own])]
            rows = list(getattr(layer, "output_partition_sizes", [layer.output_size]))
            quantised = hasattr(layer.quant_method, "fp8_linear")
            operands = _block(layer, rows, whole) if quantised else _plain(layer, rows, whole)
            yield from zip(modules, operands, strict=True)


def _block(layer: Any, rows: list[int], whole: bool) -> list[Operand]:
    """Operands of a block-FP8 layer, part by part."""
    kernel = layer.quant_method.fp8_linear
    block_rows, block_columns = layer.weight_block_size
    codes, scale_inv = layer.weight.data, layer.weight_scale_inv.data
    element = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(codes.dtype)
    # DeepGEMM packs the scales for Blackwell, as exponents; they are compared no further.
    is_packed = scale_inv.dtype != torch.float32
    rounding = "pow2" if is_packed or powers_of_two(scale_inv) else "fp32"
    declared = _input_format(kernel)
    fault = None
    dequantised = getattr(layer, "dequantised_weight", None)
    if dequantised is not None:
        blocks = (block_rows, block_columns)
        expected = dequantize_block(codes, scale_inv, blocks, dequantised.dtype)
        if not torch.equal(expected, dequantised):
            fault = "what it multiplies by is not its codes times its scales"
    scale_rows = [-(-count // block_rows) for count in rows]
    scale_parts = [None] * len(rows) if is_packed else scale_inv.split(scale_rows)
    parts = zip(codes.split(rows), scale_parts, strict=True)
    return [
        Operand(
            weight=f"{element} {block_rows}x{block_columns} {rounding}",
            input="unquantised" if declared is None else declared.short_str(),
            kernel=type(kernel).__name__,
            digest=digest(part, scales) if whole and scales is not None else None,
            fault=fault,
        )
        for part, scales in parts
    ]


def _input_format(kernel: Any) -> BlockFormat | None:
    """The format in which a kernel quantises inputs; None where that is not known here."""
    if type(kernel).__name__ == SERVING_KERNEL["cuda"]:
        quantiser = kernel.quant_fp8
        shape = quantiser.group_shape
        return deep_gemm_input_format(shape.row, shape.col, uses_e8m0=quantiser.use_ue8m0)
    return getattr(kernel, "input_format", None)


def _plain(layer: Any, rows: list[int], whole: bool) -> list[Operand]:
    """Operands of an unquantised layer, part by part."""
    weight = _read_back(layer) if whole else None
    dtype = layer.weight.dtype if weight is None else weight.dtype
    if weight is not None and weight.dtype.itemsize > 1:
        weight = canonical(weight[: sum(rows)])
    fmt = format_str(str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    parts = [None] * len(rows) if weight is None else weight.split(rows)
    return [
        Operand(
            weight=fmt,
            input=fmt,
            kernel=type(layer.quant_method).__name__,
            digest=None if part is None else digest(part),
        )
        for part in parts
    ]


def _read_back(layer: Any) -> torch.Tensor | None:
    """``[N, K]``: the weight that the layer multiplies by, or None where that is too costly."""
    linear = getattr(layer, "cpu_linear", None)
    if linear is None:
        return layer.weight.data
    columns = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
    rows = getattr(layer, "output_size_per_partition", None) or layer.num_embeddings_per_partition
    if columns * columns * rows > READBACK_LIMIT:
        return None
    identity = torch.eye(columns, dtype=layer.weight.dtype)
    return linear(identity, layer.weight, None).t().contiguous()
