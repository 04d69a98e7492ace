"""What all tests share: the environment, set before torch or vLLM is imported, and tiny models."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support.te_package import te_environment, te_package  # noqa: F401

# A loaded machine is slow, which says nothing about the code.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

ENVIRONMENT = {
    # No test may depend on the network.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    # Spinning OpenMP threads slow each other by an order of magnitude on a shared machine.
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine in this process, so that a test can look into it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
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


@pytest.fixture
def tiny_policy(tiny_model_dir: Callable[..., Path]) -> Callable:
    """Builds a fresh trainable policy: `(family, flow, *, model={}, **policy_options)`."""

    def make(family: str = "llama", flow: str = "fp32", model: dict | None = None, **options):
        from checkpoints_tools.hf import HFReader
        from megatron_rl.config import PolicyConfig
        from megatron_rl.models import model_spec
        from megatron_rl.policy.parallel import initialize
        from megatron_rl.policy.policy import Policy
        from megatron_rl.precision import resolve_flow

        path = tiny_model_dir(family, **(model or {}))
        config = PolicyConfig(**options)
        layout = initialize(config, seed=0)
        reader = HFReader(path)
        policy = Policy(model_spec(reader.config), resolve_flow(flow), config, layout)
        policy.make_trainable(10, policy.load(reader, list(reader)))
        return policy

    return make
