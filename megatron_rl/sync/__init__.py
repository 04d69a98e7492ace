"""Weights from policy to rollout."""

from megatron_rl.sync.stream import stream_weights

__all__ = ["stream_weights"]
