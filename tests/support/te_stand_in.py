"""Transformer Engine's Python package on a machine without a GPU: an emulation, for tests only.

The package `transformer_engine` is pure Python over one compiled module. `install()` puts a
stand-in for that module in its place, with the few functions that block-scaled linear layers call,
by the reference quantiser; `pretend_cuda()` lets TE believe that the CPU is a Hopper device. What
is tested with it is Python: which operand TE quantises in which format, the tensors that it makes
and that we read. It says nothing about TE's kernels.

Both change this process for good or while they are active; use a process of its own. Made for TE
2.20.2.
"""

import contextlib
import enum
import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megatron_rl.precision.quantize import dequantize_block, quantize_block
from support import te_optimizer_stand_in

FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
UNWRITTEN = 3.0
"""What the padding of scales holds, which on a device is whatever was there before."""


class DType(enum.IntEnum):
    """The compiled module's enum; TE asserts that it has exactly these members."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


def _numbered(name: str, members: str) -> type[enum.IntEnum]:
    return enum.IntEnum(name, members, start=0)


class _Placeholder:
    """Anything that TE names at import and never uses here: an attribute, a decorator, a type."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._members: dict[str, _Placeholder] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "__members__":  # TE compares the names of its enums with these
            return self._members
        if name.startswith("__"):
            raise AttributeError(name)
        return self._members.setdefault(name, _Placeholder(f"{self._name}.{name}"))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not keywords:
            return arguments[0]  # a decorator
        if self._name.startswith("transformer_engine_torch."):
            raise NotImplementedError(f"{self._name} has no stand-in")
        return self

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Placeholder) and other._name == self._name

    def __int__(self) -> int:
        return hash(self._name) & 0xFFFF

    __index__ = __int__

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class _PlaceholderModule(types.ModuleType):
    """A module of placeholders."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Placeholder(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _module(name: str) -> types.ModuleType:
    module = _PlaceholderModule(name)
    module.__version__ = "9.0"
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


def install() -> None:
    """Makes `import transformer_engine.pytorch` work; the package must be on the path."""
    assert "transformer_engine" not in sys.modules
    importlib.import_module("torch._inductor.utils")  # before it could take the next for Triton
    unused = ("triton", "triton.language", "triton.language.standard", "onnxscript", "onnx")
    for name in unused:
        _module(name)
    tex = _module("transformer_engine_torch")
    tex.DType = DType
    gemms = "GEMM{0}_INPUT GEMM{0}_WEIGHT GEMM{0}_OUTPUT"
    tex.FP8FwdTensors = _numbered("FP8FwdTensors", " ".join(gemms.format(i) for i in (1, 2, 3)))
    gradients = "GRAD_OUTPUT{0} GRAD_INPUT{0}"
    tex.FP8BwdTensors = _numbered("FP8BwdTensors", " ".join(gradients.format(i) for i in (1, 2, 3)))
    own = (quantize, generic_gemm, create_empty_quantized_tensor, swap_first_dims)
    for function in (*own, *te_optimizer_stand_in.FUNCTIONS):
        setattr(tex, function.__name__, function)
    tex.get_cublasLt_version = lambda: 130000
    tex.get_cudnn_version = lambda: 92400
    tex.get_num_cublas_streams = lambda: 4
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # skips loading CUDA's libraries
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch  # noqa: F401
    for name in unused:  # nobody else is to take them for the real ones
        del sys.modules[name]


def quantize(x: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """`transformer_engine_torch.quantize` of a `Float8BlockQuantizer`."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    fields = _quantised(x.detach(), quantizer)
    if output is not None:
        for name, value in fields.items():
            held = getattr(output, f"_{name}")
            if held is not None:
                held.copy_(value)
        return output
    common = dict(
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        is_2D_scaled=quantizer.block_scaling_dim == 2,
        **{
            name: fields.get(name)
            for side in ("rowwise", "columnwise")
            for name in (f"{side}_data", f"{side}_scale_inv")
        },
    )
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**common, fake_dtype=x.dtype)
    return Float8BlockwiseQTensor(shape=x.shape, dtype=x.dtype, device=x.device, **common)


def _quantised(x: torch.Tensor, quantizer: Any) -> dict[str, torch.Tensor]:
    """Codes and scales as TE lays them out, for the usages that are asked for."""
    matrix = x.reshape(-1, x.shape[-1])
    rows = 128 if quantizer.block_scaling_dim == 2 else 1
    mode = "pow2" if quantizer.force_pow_2_scales else "fp32"

    def blocks(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        element = FP8[quantizer.dtype.name]
        codes, scale_inv = quantize_block(
            source, (rows, 128), mode, element, quantizer.amax_epsilon
        )
        # Scales of 1 x 128 blocks lie transposed; both are padded to a multiple of 4 columns.
        scale_inv = scale_inv if rows == 128 else scale_inv.t()
        padding = -scale_inv.shape[1] % 4
        padded = torch.nn.functional.pad(scale_inv, (0, padding), value=UNWRITTEN)
        return codes.view(torch.uint8), padded.contiguous()

    fields = {}
    if quantizer.rowwise_usage:
        codes, scale_inv = blocks(matrix)
        fields |= {"rowwise_data": codes.view(x.shape), "rowwise_scale_inv": scale_inv}
    if quantizer.columnwise_usage:
        codes, scale_inv = blocks(matrix.t().contiguous())
        shape = quantizer.get_columnwise_shape(x.shape)
        fields |= {"columnwise_data": codes.view(shape), "columnwise_scale_inv": scale_inv}
    return fields


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    out: torch.Tensor | None,
    quantization_params: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, Any]:
    """`op(B) op(A)` with both operands contracted along the axis of their scales' blocks."""
    assert not gelu and quantization_params is None and use_split_accumulator
    assert options.get("comm_overlap") is None and not accumulate
    a, b = _operand(A, transa), _operand(B, not transb)
    dtype = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}[int(out_dtype)]
    assert dtype == a.dtype == b.dtype, (dtype, a.dtype, b.dtype)
    product = b @ a.t()
    bias_gradient = None
    if bias is not None and bias.numel():
        assert grad, "the bias is added outside the product"
        bias_gradient = (b.t() if not transb else b).sum(-1).to(bias.dtype)
    if not transb:
        product = product.view(*B.size()[:-1], product.shape[-1])
    if out is not None:
        product = out.copy_(product.view(out.shape))
    return product, bias_gradient, None, options.get("extra_output")


def _operand(tensor: Any, rowwise: bool) -> torch.Tensor:
    """`[outer, contracted]`, dequantised: what a block-scaled product multiplies."""
    if not hasattr(tensor, "_rowwise_data"):
        matrix = tensor.reshape(-1, tensor.shape[-1])
        return matrix if rowwise else matrix.t()
    side = "rowwise" if rowwise else "columnwise"
    codes, scale_inv = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
    assert codes is not None, f"{side} codes are missing"
    matrix = codes.reshape(-1, codes.shape[-1]) if rowwise else codes.reshape(codes.shape[0], -1)
    matrix = matrix.view(FP8[tensor._fp8_dtype.name])
    if tensor._is_2D_scaled:
        scale_inv, block = scale_inv[:, : -(-matrix.shape[1] // 128)], (128, 128)
    else:
        scale_inv, block = scale_inv[:, : matrix.shape[0]].t().contiguous(), (1, 128)
    values = dequantize_block(matrix, scale_inv, block)
    # In the memory order of the CPU path, which holds no transposed copies: with AMX the order in
    # which a product sums depends on it.
    return values if rowwise else values.t().contiguous().t()


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A tensor of the quantiser's usages, to be filled by a collective."""
    return quantize(torch.zeros(shape, dtype=dtype), quantizer)


def swap_first_dims(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Undoes the interleaving of gathered shards of transposed data."""
    out.copy_(tensor.transpose(0, 1))


def _one_by_one(*_: Any, **__: Any) -> Any:
    """In place of a coalescing manager: gloo writes garbage where one call holds two dtypes."""
    return contextlib.nullcontext(types.SimpleNamespace(wait=lambda: None))


class _Stream:
    """A CUDA stream or event on which nothing ever waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Stream()


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """Within it, this process has a Hopper device, and that device is the CPU."""
    properties = types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
    )
    cuda = {
        "is_available": lambda: True,
        "current_device": lambda: torch.device("cpu"),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
    }
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch("torch.version.cuda", "13.0"))
        stack.enter_context(mock.patch("torch.distributed._coalescing_manager", _one_by_one))
        for name, value in {
            "is_cuda": property(lambda tensor: True),
            "cuda": lambda tensor, *_, **__: tensor,
            "record_stream": lambda tensor, *_: None,
        }.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        workspace = torch.empty(1, dtype=torch.uint8)
        stack.enter_context(mock.patch.object(gemm, "get_cublas_workspace", lambda *_: workspace))
        stack.enter_context(
            mock.patch.object(
                FP8GlobalStateManager,
                "reduce_and_update_fp8_tensors",
                classmethod(lambda cls, **_: None),
            )
        )
        yield


class _Platform(types.SimpleNamespace):
    """What `current_platform` makes while the CPU stands in for CUDA."""

    device = torch.device("cpu")


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """Within it, TE and our policy take this process for one with CUDA.

    The policy's parallel state must have been initialised before, on the CPU platform: that is what
    lets Megatron run here.
    """
    with (
        pretend_cuda(),
        mock.patch("megatron_rl.platforms.device.Platform", _Platform),
        mock.patch(
            "megatron.core.distributed.param_and_grad_buffer._coalescing_manager", _one_by_one
        ),
    ):
        yield
