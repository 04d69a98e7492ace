"""Saves and restores a policy through Megatron's ``dist_checkpointing`` (format ``torch_dist``).

A checkpoint holds the model, the optimizer (FP32 master weights and moments), the schedule, the
random states and whatever the trainer adds. It is *complete* when its manifest exists: the manifest
is written last, and a directory without one is never resumed from.

Traps that are handled here and tested. torch's Adam under Megatron's distributed optimizer: an
optimizer that never stepped has no state to load into; its ``step`` has no shard; and after a load
all parameters share one ``step`` tensor, which would then count once a parameter. Megatron's
schedule: a load adds the saved steps to those already taken.
"""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.models import ModelSpec
from megatron_rl.policy.optimizer import initialize_state, torch_optimizers
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.policy import Policy

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The only layout of optimizer state that loads at another TP, PP or DP."""


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"global_step_{step}"


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under ``root``, ascending."""
    names = [
        path.parent.name.removeprefix("global_step_")
        for path in root.glob(f"global_step_*/{MANIFEST}")
    ]
    # A user's copy, such as global_step_20.best, is left alone.
    return sorted(int(name) for name in names if name.isdecimal())


def save_checkpoint(
    root: Path, step: int, policy: Policy, trainer_state: dict[str, Any], *, keep: int
) -> Path:
    """Saves a checkpoint, then deletes the oldest others, so that ``keep`` complete ones remain.

    Args:
        root: Directory of the run's checkpoints.
        step: Trainer steps that are done.
        policy: Model, optimizer and schedule.
        trainer_state: JSON-able state of the trainer.
        keep: Complete checkpoints to keep.

    Raises:
        CheckpointError: It could not be written; older checkpoints are untouched.
    """
    directory = checkpoint_path(root, step)
    if policy.layout.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    dist.barrier()
    _install_adaptor()
    try:
        dist_checkpointing.save(
            _state(policy, is_loading=False), str(directory), content_metadata=dict(METADATA)
        )
    except (Exception, CheckpointException) as error:
        # torch's CheckpointException is no Exception. The writers are processes of their own, so
        # a full disk arrives here in many shapes, some with tracebacks of theirs.
        if policy.layout.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {directory}: "
            f"{_last_line(error)}; earlier "
            "checkpoints are untouched. Make room, then start the same command again, which "
            "continues from the last complete one"
        ) from error
    dist.barrier()
    if policy.layout.rank == 0:
        manifest = {
            "step": step,
            "flow": policy.flow.name,
            "model": _model_identity(policy.spec),
            "layout": _layout(policy.layout),
            "trainer": trainer_state,
            "files": {p.name: p.stat().st_size for p in sorted(directory.iterdir())},
        }
        _write_json(directory / MANIFEST, manifest)
        _write_text(root / LATEST, f"{step}\n")
        # The new one stays even where a run that went back to an older checkpoint left later ones.
        others = [other for other in complete_steps(root) if other != step]
        for old in others[: max(0, len(others) + 1 - keep)]:
            # Without its manifest a half-deleted checkpoint is not mistaken for a complete one.
            (checkpoint_path(root, old) / MANIFEST).unlink()
            shutil.rmtree(checkpoint_path(root, old))
    dist.barrier()
    return directory


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads and checks a checkpoint's manifest.

    Raises:
        ValueError: The directory is no complete checkpoint, or a file of it is missing or cut.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is no complete checkpoint: it has no {MANIFEST}")
    manifest: dict[str, Any] = json.loads(path.read_text())
    for name, size in manifest["files"].items():
        file = directory / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            raise ValueError(
                f"checkpoint file {file} has {actual or 0} bytes instead of {size}; "
                "resume from an older checkpoint with trainer.resume_mode=path"
            )
    return manifest


def load_checkpoint(directory: Path, policy: Policy) -> dict[str, Any]:
    """Restores a policy in place; loading twice is the same as loading once.

    Returns:
        The trainer's state.

    Raises:
        ValueError: The checkpoint is incomplete, or of another model or flow.
    """
    manifest = read_manifest(directory)
    for what, saved, ours in (
        ("model", manifest["model"], _model_identity(policy.spec)),
        ("precision flow", manifest["flow"], policy.flow.name),
    ):
        if saved != ours:
            raise ValueError(
                f"checkpoint {directory} is of {what} {saved!r}, and this run is of {ours!r}; use "
                "another run name, or the configuration that the checkpoint was made with"
            )
    same_layout = manifest["layout"] == _layout(policy.layout)
    _install_adaptor()
    initialize_state(policy.optimizer)
    with torch.no_grad():
        request = _state(policy, is_loading=True)
        if not same_layout:
            # Random states belong to ranks; nothing that is sampled depends on them.
            del request["rng"]
        state = dist_checkpointing.load(request, str(directory))
        policy.model.load_state_dict(state["model"])
        policy.optimizer.load_state_dict(state["optimizer"])
    policy.weights_changed()
    if policy.loss_scale is not None:
        policy.loss_scale.load_state_dict(state["loss_scale"])
    policy.scheduler.num_steps = 0  # Megatron's scheduler adds the saved steps to its own
    policy.scheduler.load_state_dict(state["scheduler"])
    for inner in torch_optimizers(policy.optimizer):
        for values in inner.state.values():
            values["step"] = values["step"].clone()
    if same_layout:
        _set_rng_state(state["rng"])
    trainer: dict[str, Any] = manifest["trainer"]
    return trainer


def _state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    model = policy.model.sharded_state_dict(metadata=METADATA)
    state = {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=METADATA
        ),
        "scheduler": policy.scheduler.state_dict(),
        "rng": _sharded_rng_state(policy.layout),
    }
    if policy.loss_scale is not None:
        state["loss_scale"] = policy.loss_scale.state_dict()
    return state


def _sharded_rng_state(layout: ParallelLayout) -> ShardedObject:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    shape = (layout.pp_size, layout.tp_size)
    place = (layout.pp_rank, layout.tp_rank)
    return ShardedObject("rng", state, shape, place, replica_id=layout.dp_rank)


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _layout(layout: ParallelLayout) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "data_parallel_size": layout.dp_size,
    }


def _model_identity(spec: ModelSpec) -> str:
    """What must agree between a checkpoint and a run, in one line."""
    return (
        f"{spec.architecture} {spec.num_layers}x{spec.hidden_size}, {spec.num_attention_heads}/"
        f"{spec.num_query_groups} heads of {spec.head_dim}, ffn {spec.ffn_hidden_size}, "
        f"vocabulary {spec.vocab_size}, {'tied' if spec.tie_word_embeddings else 'untied'} head"
    )


def _install_adaptor() -> None:
    """Covers the modules that dist_checkpointing imports when it is first used."""
    if not torch.cuda.is_available():
        from megatron_rl.platforms.cpu_megatron import install

        install()


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=1) + "\n")


def _write_text(path: Path, text: str) -> None:
    """Writes a small file whole: beside its place, then renamed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
