"""Refuses to train where rollout does not compute what the flow says, on the policy's own bytes."""

import torch.distributed as dist

from megatron_rl.platforms import current_platform
from megatron_rl.policy.policy import Policy
from megatron_rl.precision.audit import audit, summarise
from megatron_rl.rollout import Engine


def require_contained(policy: Policy, engine: Engine) -> None:
    """Audits the live modules of both sides after a weight sync; a collective over all ranks.

    Raises:
        ValueError: A rank found a violation; every rank raises it.
    """
    everyone: list[list[str]] = [[] for _ in range(policy.layout.world_size)]
    dist.all_gather_object(everyone, audit(policy, engine, platform=current_platform().name))
    for rank, violations in enumerate(everyone):
        if violations:
            raise ValueError(
                f"rollout does not compute what training does (rank {rank}): "
                f"{summarise(violations)}; see docs/precision.md, and report it if no option of "
                "yours explains it"
            )
