"""The environment of a run, exported before torch, Megatron or vLLM is imported.

Those libraries read many of their switches once, at import; set later, they would be ignored in
silence.
"""

import os
import sys

HEAVY = ("torch", "vllm", "megatron.core", "transformer_engine")


def run_environment() -> dict[str, str]:
    """Variables of a training process."""
    from megatron_rl.rollout.environment import rollout_environment

    threads = os.environ.get("OMP_NUM_THREADS") or str(_threads_per_rank())
    return rollout_environment() | {
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
    }


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
