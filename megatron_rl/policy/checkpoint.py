"""Saves and restores a policy through Megatron's ``dist_checkpointing`` (format ``torch_dist``).

A checkpoint holds the model, the optimizer (FP32 master weights and moments), the schedule, the
random states and whatever the trainer adds. It is *complete* when its manifest exists: the manifest
is written last, and a directory without one is never resumed from.

Traps that are handled here and tested. torch's Adam under Megatron's distributed optimizer: an
optimizer that never stepped has no state to load into; its ``step`` has no shard; and after a load
all parameters share one ``step`` tensor, which would then count once a parameter. Megatron's
schedule: a load adds the saved steps to those already taken.
"""

import copy
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
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.models import ModelSpec
from megatron_rl.policy import checkpoint_files
from megatron_rl.policy.checkpoint_files import (
    CheckpointError,
    checkpoint_path,
    complete_steps,
    read_manifest,
    staging_path,
)
from megatron_rl.policy.optimizer import (
    initialize_state,
    parameters_from_masters,
    torch_optimizers,
)
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.policy import Policy

__all__ = [
    "CheckpointError",
    "checkpoint_path",
    "complete_steps",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
]

logger = logging.getLogger(__name__)

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The only layout of optimizer state that loads at another TP, PP or DP."""


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
    directory = begin_save(root, step, policy)
    try:
        save_state(policy, directory)
    except (Exception, CheckpointException) as error:
        raise save_failed(root, step, error) from error
    dist.barrier()
    if policy.layout.rank == 0:
        checkpoint_files.publish(root, step, describe(step, policy, trainer_state), keep=keep)
    dist.barrier()
    return checkpoint_path(root, step)


def begin_save(root: Path, step: int, policy: Policy) -> Path:
    """Makes the directory that every rank then saves into."""
    if policy.layout.rank == 0:
        checkpoint_files.prepare_staging(root, step)
    dist.barrier()
    _install_adaptor()
    return staging_path(root, step)


def save_state(policy: Policy, directory: Path, *, in_background: bool = False) -> Any:
    """Saves the policy's state, or returns Megatron's request to do so in the background."""
    return dist_checkpointing.save(
        _state(policy, is_loading=False),
        str(directory),
        async_sharded_save=in_background,
        content_metadata=dict(METADATA),
    )


def save_failed(root: Path, step: int, error: BaseException) -> CheckpointError:
    """Removes what a failed save wrote, and says what to do.

    torch's CheckpointException is no Exception, and the writers are processes of their own, so a
    full disk arrives in many shapes, some with tracebacks of theirs.
    """
    # Megatron's writers answer through one queue a process. What a failed save left in it would be
    # taken for the answers of the next one, whose metadata would then be wrong, in silence.
    filesystem_async._results_queue = None
    if dist.get_rank() == 0:
        shutil.rmtree(staging_path(root, step), ignore_errors=True)
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {checkpoint_path(root, step)}: "
        f"{_last_line(error)}; earlier checkpoints are untouched. Make room, then start the same "
        "command again, which continues from the last complete one"
    )


def describe(step: int, policy: Policy, trainer_state: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a checkpoint, but for its files; a copy that later steps do not change."""
    return copy.deepcopy(
        {
            "step": step,
            "flow": policy.flow.name,
            "model": _model_identity(policy.spec),
            "layout": _layout(policy.layout),
            "trainer": trainer_state,
        }
    )


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
    policy.gather_parameters()  # nothing may still be on its way into what is loaded
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
        if policy.megatron_config.fp8_param:
            # A checkpoint holds values, for which other codes and scales may stand as well.
            parameters_from_masters(policy.optimizer, policy.ddp)
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
    policy.gather_parameters()
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
