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
