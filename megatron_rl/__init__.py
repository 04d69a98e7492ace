"""Reinforcement-learning post-training on Megatron-core and vLLM in one precision flow."""

__version__ = "0.1.0"
