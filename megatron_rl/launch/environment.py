"""The environment of a run, exported before torch, Megatron or vLLM is imported.

Those libraries read many of their switches once, at import; set later, they would be ignored in
silence.
"""

import os
import sys
from pathlib import Path

from megatron_rl.precision import PrecisionFlow
from megatron_rl.precision.environment import flow_environment

NVIDIA_DRIVER = Path("/dev/nvidiactl")
HEAVY = ("torch", "vllm", "megatron.core", "transformer_engine")


def run_environment(flow: PrecisionFlow) -> dict[str, str]:
    """Variables of a process that trains and samples.

    Those that only set a level of noise, or the threads, give way to the caller's.

    Args:
        flow: The run's flow, whose quantisers the libraries choose by variables on CUDA.
    """
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine shares the trainer's process and memory
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine take turns on the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    defaults = {
        "OMP_NUM_THREADS": str(_threads_per_rank()),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    if NVIDIA_DRIVER.exists():
        fixed |= flow_environment(flow)
    else:
        # vLLM compiles a helper of its sampler on first use: seconds of g++, for microseconds.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    return fixed | {name: os.environ.get(name, value) for name, value in defaults.items()}


def export_environment(variables: dict[str, str]) -> None:
    """Sets the variables of this process and its children.

    Raises:
        RuntimeError: A library that reads them at import was imported already.
    """
    loaded = [name for name in HEAVY if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{', '.join(loaded)} was imported before the run's environment was set")
    os.environ.update(variables)


def _threads_per_rank() -> int:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)
