"""The rollout side: the engine contract, and vLLM behind it, imported when one is built."""

from megatron_rl.rollout.seeds import derive_seed, preserve_host_rng
from megatron_rl.rollout.types import (
    Completion,
    Engine,
    NonFiniteWeights,
    RolloutTimeout,
    Sampling,
)

__all__ = [
    "Completion",
    "Engine",
    "NonFiniteWeights",
    "RolloutTimeout",
    "Sampling",
    "derive_seed",
    "preserve_host_rng",
]
