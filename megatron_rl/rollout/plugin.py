"""vLLM's general plugin: called once in every process that vLLM starts.

On a CPU it adds the block-FP8 linear kernel, which vLLM has on no CPU without AMX and nowhere with
quantised activations, and changes one name: the ranks of a tensor-parallel engine meet in a
shared-memory segment whose name is the same for every job of the machine, so that two jobs, or one
after a crash, collide.

On CUDA it keeps the weights as they were sent: vLLM would quantise them a second time.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Entry point ``vllm.general_plugins``; safe to call more than once."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _register_kernel()
        _name_shared_memory_per_job()
    elif current_platform.is_cuda():
        keep_power_of_two_scales()


def keep_power_of_two_scales() -> None:
    """Stops vLLM from requantising weights whose scales are powers of two already.

    It does so at every load for DeepGEMM, and what comes out is not what went in: a block whose
    largest code is 224 gets other codes and half the scale, and one whose largest value is below
    1e-4 loses precision. Other scales (the random ones of an engine without weights) are left to
    vLLM; the audit reads the scales that are served.
    """
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    requantise = fp8_utils.requant_weight_ue8m0_inplace
    if getattr(requantise, "keeps_powers_of_two", False):
        return

    def requantise_others(
        weight: "torch.Tensor", weight_scale: "torch.Tensor", block_size: Sequence[int] = (128, 128)
    ) -> None:
        from megatron_rl.precision.scaling import powers_of_two

        if not powers_of_two(weight_scale):
            requantise(weight, weight_scale, block_size)

    requantise_others.keeps_powers_of_two = True  # type: ignore[attr-defined]
    fp8_utils.requant_weight_ue8m0_inplace = requantise_others


def _register_kernel() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.platforms import PlatformEnum

    from megatron_rl.rollout.fp8_kernel import ReferenceFp8BlockKernel

    kernels = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if ReferenceFp8BlockKernel not in kernels:
        kernels.insert(0, ReferenceFp8BlockKernel)


def _name_shared_memory_per_job() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    if getattr(original, "is_per_job", False):
        return

    def make_group_name(communicator: object) -> str:
        job = f"{os.environ.get('MASTER_PORT', '')}_{os.getppid()}"
        return f"{job}{original(communicator)}".replace("/", "_")

    make_group_name.is_per_job = True  # type: ignore[attr-defined]
    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
