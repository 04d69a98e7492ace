"""Run by test_dead_rank: rank 1 leaves in the middle of a job, as a killed process does."""

import os

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyConfig
from megatron_rl.policy.parallel import initialize


def main() -> None:
    layout = initialize(PolicyConfig(), seed=0, timeout_s=20)
    dist.barrier()
    if layout.rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))
    print("rank 0 went on without its peer", flush=True)


if __name__ == "__main__":
    main()
