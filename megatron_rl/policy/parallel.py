"""Process groups and random states of the policy: torch.distributed plus Megatron's parallel state.

One process is a world of size one, so that every other file speaks parallel state and none asks
whether there is more than one rank.
"""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyConfig
from megatron_rl.platforms import current_platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes and this rank's coordinates of the parallel groups."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int


def initialize(config: PolicyConfig, seed: int, *, timeout_s: float = 600.0) -> ParallelLayout:
    """Joins the process group (or makes a world of one) and builds Megatron's parallel state.

    Args:
        config: Parallel sizes.
        seed: Seed of Megatron's RNG tracker (initialisation, dropout).
        timeout_s: Time limit of one collective.

    Raises:
        ValueError: The world size does not fit TP x PP.
    """
    platform = current_platform()
    if platform.name == "cpu":
        from megatron_rl.platforms.cpu_megatron import install

        install()
    else:
        torch.cuda.set_device(platform.device)
    if not dist.is_initialized():
        limits = {"timeout": timedelta(seconds=timeout_s)}
        if "RANK" in os.environ:
            dist.init_process_group(platform.backend, **limits)
        else:
            # A world of one needs no port, and leaves no variables for child processes to read.
            store = dist.HashStore()
            dist.init_process_group(platform.backend, store=store, rank=0, world_size=1, **limits)
    from megatron.core import parallel_state, tensor_parallel

    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if dist.get_world_size() % (tp * pp):
        raise ValueError(
            f"{dist.get_world_size()} ranks cannot hold policy.tensor_model_parallel_size={tp} x "
            f"policy.pipeline_model_parallel_size={pp}; start a multiple of {tp * pp} ranks"
        )
    if not parallel_state.model_parallel_is_initialized():
        # Megatron's groups do not take the limit of the default group.
        parallel_state.initialize_model_parallel(tp, pp, distributed_timeout_minutes=timeout_s / 60)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return current_layout()


def current_layout() -> ParallelLayout:
    """The layout of the running process, read from Megatron's parallel state."""
    from megatron.core import parallel_state as ps

    return ParallelLayout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=ps.get_pipeline_model_parallel_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
    )


def shutdown() -> None:
    """Leaves the process groups."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
