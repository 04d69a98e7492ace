"""What all tests share: the environment, set before torch or vLLM is imported, and tiny models."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    # No test may depend on the network.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    # Spinning OpenMP threads slow each other by an order of magnitude on a shared machine.
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine in this process, so that a test can look into it, with a small KV cache (GiB).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function `(family="llama", **options) -> Path` that writes a tiny random model.

    The options are those of `checkpoints_tools.tiny.write_tiny_model`. The same arguments give the
    same directory, shared by the whole session: tests must not write into it.
    """
    written: dict[tuple[str, str], Path] = {}

    def make(family: str = "llama", **options: Any) -> Path:
        # torch takes seconds to import; tests that need no model do without.
        from checkpoints_tools.tiny import write_tiny_model

        key = (family, repr(sorted(options.items())))
        if key not in written:
            path = tmp_path_factory.mktemp(f"tiny_{family}") / "model"
            written[key] = write_tiny_model(path, family, **options)
        return written[key]

    return make
