"""Weights from policy to rollout."""

from megatron_rl.sync.stream import stream_checkpoint, stream_weights

__all__ = ["stream_checkpoint", "stream_weights"]
