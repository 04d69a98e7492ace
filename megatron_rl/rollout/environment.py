"""Environment variables that vLLM reads at import, for a colocated in-process engine.

``launch`` exports them before torch or vLLM is imported.
"""

import os


def rollout_environment() -> dict[str, str]:
    """Variables of an in-process engine on any platform."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine shares the trainer's process and memory
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine take turns on the same cores
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": os.environ.get("VLLM_CONFIGURE_LOGGING", "1"),
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
