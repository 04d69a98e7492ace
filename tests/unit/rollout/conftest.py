"""Policies and engines on tiny models, built once: starting an engine takes seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.tiny_engine import build_engine, build_policy


@pytest.fixture(scope="session")
def policy_and_engine(tiny_model_dir: Callable[..., Path]) -> Callable:
    """Builds (policy, engine) of a family and flow.

    No engine is closed, see `support.tiny_engine`.
    """
    built: dict = {}

    def make(family: str, flow: str, **kwargs):
        key = (family, flow, tuple(sorted(kwargs.items())))
        if key not in built:
            path = tiny_model_dir(family, **kwargs)
            policy = build_policy(path, flow)
            built[key] = (policy, build_engine(path, policy))
        return built[key]

    return make
