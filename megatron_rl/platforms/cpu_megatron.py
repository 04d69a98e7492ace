"""Lets megatron-core run on a machine without CUDA: the CPU adaptor.

megatron-core computes nothing that a CPU cannot, but it *names* CUDA in many places: it allocates
on ``torch.cuda.current_device()``, asks for streams, and compares ``tensor.type()`` with
``"torch.cuda.FloatTensor"``. The adaptor answers those calls with the CPU.

It does so without touching ``torch`` itself, because vLLM lives in the same process: each loaded
``megatron.core`` module has its global name ``torch`` replaced by a proxy that differs from torch
in the items of :data:`PATCHES` and in nothing else. Two ``Tensor`` methods cannot be reached that
way; they are wrapped, and change their answer only for a caller inside ``megatron``. Outside
megatron, ``torch`` behaves as before.

The list is closed and belongs to one version of megatron-core, which :func:`install` checks. It is
never installed where CUDA is available. It adds no numerics: gloo does the communication, torch the
arithmetic.
"""

import functools
import importlib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

SUPPORTED_MEGATRON_CORE = "0.16.1"

PATCHES = {
    "torch.<factory>(device=, pin_memory=)": "factories put 'cuda' tensors on the CPU, unpinned",
    "torch.cuda": "device, streams, events, RNG and memory statistics of a single CPU device",
    "Tensor.type": "reports 'torch.cuda.XTensor' to callers in megatron, which compare it",
    "Tensor.cuda": "returns the tensor itself to callers in megatron",
    "tensor_parallel.random.{_get,_set}_cuda_rng_state": "read and write the CPU generator",
    "DistributedOptimizer.{_get,_set}_main_param_and_optimizer_states": (
        "leave out torch AdamW's per-parameter `step`, which has no shard"
    ),
}
"""Everything that the adaptor changes, and why. Each entry has a test."""

FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
]

_CPU = torch.device("cpu")


class _Stream:
    """A CUDA stream on a machine that executes in order: waiting is a no-op."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()


class _Event:
    """A CUDA event on a machine that executes in order: always complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _CpuAsCuda(types.ModuleType):
    """What megatron-core sees as ``torch.cuda``; anything not listed is torch's own."""

    Stream = _Stream
    Event = _Event

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        stream = _Stream()
        self.current_stream = self.default_stream = lambda *_a, **_k: stream
        self.current_device = lambda: _CPU
        self.device_count = lambda: 1
        self.synchronize = self.empty_cache = self.set_device = lambda *_a, **_k: None
        self.reset_peak_memory_stats = lambda *_a, **_k: None
        self.memory_allocated = self.max_memory_allocated = lambda *_a, **_k: 0
        self.memory_reserved = self.max_memory_reserved = lambda *_a, **_k: 0
        self.is_current_stream_capturing = lambda: False
        self.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
        self.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
        self.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
        self.nvtx = types.SimpleNamespace(
            range_push=lambda *_a, **_k: None, range_pop=lambda: None, mark=lambda *_a: None
        )

    @staticmethod
    @contextmanager
    def stream(stream: Any):
        yield stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchProxy(types.ModuleType):
    """``torch`` for megatron-core: torch itself, but for ``cuda`` and the factories."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuAsCuda()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _called_from_megatron() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")


def _wrap_tensor_methods() -> None:
    original_type, original_cuda = torch.Tensor.type, torch.Tensor.cuda

    @functools.wraps(original_type)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        if not args and not kwargs and _called_from_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    @functools.wraps(original_cuda)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else original_cuda(self, *args, **kwargs)

    torch.Tensor.type, torch.Tensor.cuda = tensor_type, cuda  # type: ignore[method-assign]


def _patch_rng_state() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)


def _patch_optimizer_state() -> None:
    """Torch AdamW keeps ``step`` beside the moments; DistributedOptimizer would shard it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    get_states = DistributedOptimizer._get_main_param_and_optimizer_states
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def get_without_step(self: Any, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        states = dict(get_states(self, model_param))
        states.pop("step", None)
        return states

    def set_without_step(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            set_states(self, model_param, tensors)
            return
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        with torch.no_grad():
            main_param.copy_(tensors["param"])
            for name, value in self.optimizer.state[main_param].items():
                if name != "step":
                    value.copy_(tensors[name])

    DistributedOptimizer._get_main_param_and_optimizer_states = get_without_step
    DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step


MODULES = (
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
)


def install() -> int:
    """Installs the adaptor; safe to call again after more of megatron-core was imported.

    Returns:
        Number of ``megatron.core`` modules that now see the proxy.

    Raises:
        RuntimeError: CUDA is available, or megatron-core is of another version than the adaptor.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU adaptor is for machines without CUDA, and this one has it")
    version = importlib.metadata.version("megatron-core")
    if version != SUPPORTED_MEGATRON_CORE:
        raise RuntimeError(
            f"the CPU adaptor was written for megatron-core {SUPPORTED_MEGATRON_CORE}, and "
            f"{version} is installed; install megatron-core=={SUPPORTED_MEGATRON_CORE}"
        )
    for name in MODULES:
        importlib.import_module(name)
    loaded = [m for n, m in sys.modules.items() if n.startswith("megatron.core") and m is not None]
    proxies = [m.__dict__.get("torch") for m in loaded]
    installed = next((p for p in proxies if isinstance(p, _TorchProxy)), None)
    if installed is None:
        _wrap_tensor_methods()
        _patch_rng_state()
        _patch_optimizer_state()
    proxy = installed or _TorchProxy()
    count = 0
    for module in loaded:
        if module.__dict__.get("torch") is torch:
            module.torch = proxy  # type: ignore[attr-defined]
        count += module.__dict__.get("torch") is proxy
    logger.debug("CPU adaptor: %d megatron.core modules", count)
    return count
