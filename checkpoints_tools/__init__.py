"""Checkpoint conversion: readers, writers and the `checkpoints-tools` command line.

Works on the parameter map of `megatron_rl.models`; nothing here runs a model.
"""
