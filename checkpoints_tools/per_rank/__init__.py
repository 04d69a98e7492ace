"""Megatron's older checkpoint format, `--ckpt-format torch`.

Each tensor- and pipeline-parallel rank has a file, a pickle of its tensors among much else.
"""

from checkpoints_tools.per_rank.files import is_per_rank
from checkpoints_tools.per_rank.source import PerRankSource

__all__ = ["PerRankSource", "is_per_rank"]
