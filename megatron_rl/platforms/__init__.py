"""What differs between CUDA and CPU: device, process-group backend, the CPU adaptor."""

from megatron_rl.platforms.device import Platform, cpu_isa, current_platform

__all__ = ["Platform", "cpu_isa", "current_platform"]
