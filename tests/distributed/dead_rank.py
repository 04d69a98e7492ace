"""Run by test_dead_rank: rank 1 leaves in the middle of a job, as a killed process does.

With the argument `hang` it stays, and never comes to a collective of a Megatron group.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from megatron_rl.config import PolicyConfig
from megatron_rl.policy.parallel import initialize


def main() -> None:
    hangs = sys.argv[1:] == ["hang"]
    layout = initialize(PolicyConfig(), seed=0, timeout_s=5 if hangs else 20)
    dist.barrier()
    group = None
    if hangs:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group()
    if layout.rank == 1:
        if not hangs:
            os._exit(7)
        time.sleep(300)
    dist.all_reduce(torch.ones(1), group=group)
    print("rank 0 went on without its peer", flush=True)


if __name__ == "__main__":
    main()
