"""The files of a checkpoint with one a rank, and which rank each is of.

Megatron names directories `mp_rank_TT`, with more than one pipeline stage `mp_rank_TT_PPP`, and
appends `_EEE` with expert parallelism, whose files are not read. A file is a pickle of the model's
tensors among much else; see `unpickle`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoints_tools.per_rank.unpickle import load_rank_file
from checkpoints_tools.te_tensors import TETensor

_FILES = ("model_optim_rng.pt", "model_rng.pt")
_DIRECTORY = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_GROUPED = re.compile(r"(.*mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
# Names in Transformer Engine's fused layers -> in the local layer spec.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

Stored = Tensor | TETensor


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What all ranks stored: by tensor-parallel rank, under names with global layer numbers."""

    by_tp_rank: tuple[Mapping[str, Stored], ...]

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size at which the checkpoint was saved."""
        return len(self.by_tp_rank)


def is_per_rank(path: Path) -> bool:
    """Whether a directory has files of ranks."""
    return any(path.glob("mp_rank_*/*.pt"))


def read_ranks(path: Path) -> RankFiles:
    """Maps every rank's file; tensors stay on disk until they are used.

    Raises:
        ValueError: A rank is missing, a file is damaged, ranks hold different names, or the
            checkpoint was saved with expert or virtual pipeline parallelism.
    """
    found: dict[tuple[int, int], Path] = {}
    for directory in sorted(path.glob("mp_rank_*")):
        match = _DIRECTORY.fullmatch(directory.name)
        if match is None:
            raise ValueError(
                f"{directory} is of a checkpoint with expert parallelism, whose files are not "
                "read; save it as torch_dist (--ckpt-format torch_dist)."
            )
        files = [directory / name for name in _FILES if (directory / name).is_file()]
        if not files:
            raise ValueError(f"{directory} has none of {', '.join(_FILES)}.")
        found[int(match[1]), int(match[2] or 0)] = files[0]
    tp_size, pp_size = (1 + max(rank[axis] for rank in found) for axis in (0, 1))
    for tp_rank in range(tp_size):
        for stage in range(pp_size):
            if (tp_rank, stage) not in found:
                raise ValueError(
                    f"{path} has files of {tp_size} tensor-parallel ranks and {pp_size} pipeline "
                    f"stages, but none of rank {tp_rank}, stage {stage}; copy the checkpoint again."
                )
    ranks = []
    for tp_rank in range(tp_size):
        held: dict[str, Stored] = {}
        first_layer = 0
        for stage in range(pp_size):
            file = found[tp_rank, stage]
            content = load_rank_file(file)
            _check_sizes(file, content.get("args"), tp_size, pp_size)
            tensors, num_layers = _renamed(file, content, first_layer)
            # A tied model's last stage repeats the embedding.
            held = tensors | held if stage else tensors
            first_layer += num_layers
        ranks.append(held)
    for tp_rank, held in enumerate(ranks):
        if set(held) != set(ranks[0]):
            name = sorted(set(held) ^ set(ranks[0]))[0]
            raise ValueError(
                f"{path}: only one of the tensor-parallel ranks 0 and {tp_rank} has {name}; copy "
                "the checkpoint again."
            )
    return RankFiles(tuple(ranks))


def _check_sizes(file: Path, args: Any, tp_size: int, pp_size: int) -> None:
    """Compares the files with what the run that saved them says of itself, if it does."""
    for name, size in (
        ("tensor_model_parallel_size", tp_size),
        ("pipeline_model_parallel_size", pp_size),
        ("expert_model_parallel_size", 1),
    ):
        said = getattr(args, name, None)
        if isinstance(said, int) and said != size:
            raise ValueError(
                f"{file} was saved with {name} {said}, but the files that are there are of {size}; "
                "copy the whole checkpoint, or save it as torch_dist (--ckpt-format torch_dist)."
            )


def _renamed(
    file: Path, content: Mapping[str, Any], first_layer: int
) -> tuple[dict[str, Stored], int]:
    """The tensors of a file by their names in the parameter map, and how many layers it has."""
    model = content.get("model")
    if not isinstance(model, dict):
        kind = "several model chunks (virtual pipeline stages)" if "model0" in content else "no"
        raise ValueError(
            f"{file} has {kind} model weights under 'model'; save it as torch_dist "
            "(--ckpt-format torch_dist)."
        )
    tensors: dict[str, Stored] = {}
    layers: set[int] = set()
    for key, value in model.items():
        if not isinstance(value, Tensor | TETensor) or key.endswith("_extra_state"):
            continue
        name = str(key).removeprefix("module.")
        if expert := _GROUPED.fullmatch(name):
            block, linear, kind, number = expert.groups()
            name = f"{block}.local_experts.{number}.{linear}.{kind}"
        if layer := _LAYER.fullmatch(name):
            layers.add(int(layer[2]))
            rest = layer[3].removeprefix(".")
            name = f"{layer[1]}{first_layer + int(layer[2])}.{_NORMS.get(rest, rest)}"
        tensors[name] = value
    if layers != set(range(len(layers))):
        raise ValueError(
            f"{file} has decoder layers {sorted(layers)}, expected all from 0 on; copy the "
            "checkpoint again."
        )
    return tensors, len(layers)
