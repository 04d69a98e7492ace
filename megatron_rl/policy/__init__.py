"""The Megatron side: the trained model, its optimizer and its checkpoints.

Submodules import megatron-core, so nothing is imported here; on a machine without CUDA
:func:`megatron_rl.policy.parallel.initialize` installs the CPU adaptor first.
"""
