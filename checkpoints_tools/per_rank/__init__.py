"""Megatron's older checkpoint format, `--ckpt-format torch`.

Each tensor- and pipeline-parallel rank has a file. With FP8 parameters it holds Transformer
Engine's codes and scales themselves, which `torch_dist` does not: there megatron-core dequantises
stacked layers when it saves.
"""

from checkpoints_tools.per_rank.codes import PerRankCodes, codes_of
from checkpoints_tools.per_rank.files import is_per_rank
from checkpoints_tools.per_rank.source import PerRankSource

__all__ = ["PerRankCodes", "PerRankSource", "codes_of", "is_per_rank"]
