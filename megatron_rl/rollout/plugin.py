"""vLLM's general plugin: called once in every process that vLLM starts; CPU only.

Adds the block-FP8 linear kernel, which vLLM has on no CPU without AMX and nowhere with quantised
activations. Changes one name: the ranks of a tensor-parallel engine meet in a shared-memory segment
whose name is the same for every job of the machine, so that two jobs, or one after a crash,
collide.
"""

import os


def register() -> None:
    """Entry point ``vllm.general_plugins``; safe to call more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _register_kernel()
    _name_shared_memory_per_job()


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
