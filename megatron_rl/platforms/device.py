"""Which platform this process computes on: CUDA where there is one, else the CPU.

The answer decides the device, the process-group backend, and whether the CPU adaptor is installed.
Nothing here initialises a device.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The platform of this process."""

    name: Literal["cuda", "cpu"]
    """``cuda`` or ``cpu``."""
    backend: Literal["nccl", "gloo"]
    """Process-group backend of ``torch.distributed``."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.name == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def current_platform() -> Platform:
    """The platform of this process."""
    if torch.cuda.is_available():
        return Platform(name="cuda", backend="nccl")
    return Platform(name="cpu", backend="gloo")


def cpu_isa() -> str:
    """The widest instruction set for products on this processor, as torch sees it.

    ``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, or the name of another architecture.
    """
    found = torch.cpu.get_capabilities()
    names = (
        ("amx_tile", "amx"),
        ("avx512_bf16", "avx512_bf16"),
        ("avx512_f", "avx512"),
        ("avx2", "avx2"),
    )
    architecture = str(found.get("architecture", "unknown"))
    return next((name for key, name in names if found.get(key)), architecture)
