"""Advantages, losses, KL estimators, train/rollout correction and aggregation.

Everything here is a pure function of torch tensors: no model, no process group, no configuration.
Shapes are `[B, S]`: B samples by S response positions, right-padded, with a mask of the response.
"""
