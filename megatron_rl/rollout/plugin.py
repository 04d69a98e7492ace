"""vLLM's general plugin: called once in every process that vLLM starts.

The ``bf16`` and ``fp32`` flows run on vLLM's own kernels. What is changed is one name: on CPU, the
ranks of a tensor-parallel engine meet in a shared-memory segment whose name is the same for every
job of the machine, so that two jobs, or one after a crash, collide.
"""

import os


def register() -> None:
    """Entry point ``vllm.general_plugins``; safe to call more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    if getattr(original, "is_per_job", False):
        return

    def make_group_name(communicator: object) -> str:
        job = f"{os.environ.get('MASTER_PORT', '')}_{os.getppid()}"
        return f"{job}{original(communicator)}".replace("/", "_")

    make_group_name.is_per_job = True  # type: ignore[attr-defined]
    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
