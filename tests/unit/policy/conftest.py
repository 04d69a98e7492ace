"""Megatron's parallel state and a configuration, made once for the tests that need no weights."""

import pytest


@pytest.fixture(scope="session")
def parallel_layout():
    from megatron_rl.config import PolicyConfig
    from megatron_rl.policy.parallel import initialize

    return initialize(PolicyConfig(), seed=0)


@pytest.fixture(scope="session")
def megatron_config(parallel_layout, tiny_model_dir):
    """Megatron's configuration of a tiny model in fp32."""
    from checkpoints_tools.hf import HFReader
    from megatron_rl.config import PolicyConfig
    from megatron_rl.models import model_spec
    from megatron_rl.policy.model import transformer_config
    from megatron_rl.precision import resolve_flow

    spec = model_spec(HFReader(tiny_model_dir("llama")).config)
    return transformer_config(spec, resolve_flow("fp32"), PolicyConfig())
