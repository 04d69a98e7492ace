"""Megatron's checkpoint format `torch_dist`, read and written without Megatron.

`torch_dist` is torch's distributed checkpoint (DCP): a pickled index `.metadata`, and `*.distcp`
files in which every piece of every tensor is a small `torch.save` archive. Megatron-core adds the
keys: the layers of a model are stacked on a leading axis, so that a checkpoint does not depend on
the tensor- or pipeline-parallel layout that it was saved from.

Nothing here imports Megatron or makes a process group: a login node is enough. Only weights are
converted; optimizer and random states are passed over.
"""

from checkpoints_tools.torch_dist.directory import write_directory
from checkpoints_tools.torch_dist.reader import is_torch_dist
from checkpoints_tools.torch_dist.source import MegatronSource
from checkpoints_tools.torch_dist.writer import plan_checkpoint

__all__ = ["MegatronSource", "is_torch_dist", "plan_checkpoint", "write_directory"]
