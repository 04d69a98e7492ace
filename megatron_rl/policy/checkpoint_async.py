"""Saves checkpoints while training goes on.

A save returns once the state is copied; a process of its own writes the files. CPU tensors are
copied by the fork itself, CUDA tensors into host memory before it, so later steps cannot change
what is written. The checkpoint becomes complete, and counts, only when every rank's files are done.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.policy import checkpoint, checkpoint_files
from megatron_rl.policy.policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A save whose files are being written."""

    root: Path
    step: int
    manifest: dict[str, Any]
    keep: int
    is_publisher: bool


class BackgroundSaver:
    """At most one save in flight; every method is a collective over all ranks."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._calls = AsyncCallsQueue(persistent=False)
        self._pending: _Pending | None = None

    def start(
        self, root: Path, step: int, policy: Policy, trainer_state: dict[str, Any], *, keep: int
    ) -> None:
        """Waits for the save in flight, then starts one; see :func:`checkpoint.save_checkpoint`.

        Raises:
            CheckpointError: The save in flight failed, or this one could not be started.
        """
        self.finish()
        manifest = checkpoint.describe(step, policy, trainer_state)
        directory = checkpoint.begin_save(root, step, policy)
        try:
            request = checkpoint.save_state(policy, directory, in_background=True)
            self._calls.schedule_async_request(request)
        except (Exception, CheckpointException) as error:
            raise checkpoint.save_failed(root, step, error) from error
        self._pending = _Pending(
            root=root,
            step=step,
            manifest=manifest,
            keep=keep,
            is_publisher=policy.layout.rank == 0,
        )

    def poll(self) -> None:
        """Completes the save in flight if its files are written on every rank.

        Raises:
            CheckpointError: They could not be written; older checkpoints are untouched.
        """
        self._complete(blocking=False)

    def finish(self) -> None:
        """Waits for the save in flight, if there is one, and completes it.

        Raises:
            CheckpointError: It could not be written; older checkpoints are untouched.
        """
        self._complete(blocking=True)

    def _complete(self, *, blocking: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            done = self._calls.maybe_finalize_async_calls(blocking=blocking)
        except (Exception, CheckpointException) as error:
            self._pending = None
            raise checkpoint.save_failed(pending.root, pending.step, error) from error
        if not done:
            return
        self._pending = None
        if pending.is_publisher:
            checkpoint_files.publish(
                pending.root, pending.step, pending.manifest, keep=pending.keep
            )
        dist.barrier()
