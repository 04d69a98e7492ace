"""Policies on tiny models in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest


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
