"""Run by test_late_sampling: ranks whose sampling is late, on engines that only count steps."""

import time
from types import SimpleNamespace

import torch.distributed as dist

from megatron_rl.rollout import Completion, RolloutTimeout, Sampling
from megatron_rl.rollout.distributed import DistributedEngine
from megatron_rl.rollout.time_limit import STEPS_PER_AGREEMENT, run_requests

LIMIT_S = 0.3


class Steps:
    """The part of vLLM's engine that is driven: each step a collective, as with rollout TP."""

    def __init__(self, num_steps, step_s):
        self.left, self.step_s, self.done = num_steps, step_s, 0
        self.llm_engine = self

    def has_unfinished_requests(self):
        return self.left > 0

    def abort_request(self, request_ids, internal):
        assert request_ids == ["0"] and internal
        self.left = 0

    def step(self):
        time.sleep(self.step_s)
        dist.barrier()
        self.left -= 1
        self.done += 1
        return [SimpleNamespace(request_id="0", finished=self.left == 0)]


class Local:
    """An engine of one rank that is late on rank 1, with 1 of 2 responses finished."""

    def generate(self, prompts, sampling, prompt_indices):
        if dist.get_rank() == 1:
            raise RolloutTimeout(1, 2, 5.0)
        return [
            Completion(
                prompt_index=index,
                sample_index=0,
                token_ids=(1,),
                logprobs=(-1.0,),
                finish_reason="stop",
            )
            for index in prompt_indices
        ]


def caught(call):
    try:
        call()
    except RolloutTimeout as error:
        return error
    raise AssertionError("in time")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # In time: every step is done. The clock of rank 1 alone runs out: both stop at one step.
    quick = Steps(3, 0.0)
    assert len(run_requests(quick, ["0"], 60.0, dist.group.WORLD)) == 1 and quick.done == 3
    slow = Steps(10_000, 0.01)
    limit_s = LIMIT_S if rank else 1000.0
    caught(lambda: run_requests(slow, ["0"], limit_s, dist.group.WORLD))
    counts = [None, None]
    dist.all_gather_object(counts, slow.done)
    assert counts[0] == counts[1] and counts[0] % STEPS_PER_AGREEMENT == 0, counts

    error = caught(lambda: DistributedEngine(Local(), 1).generate([[5]] * 3, Sampling()))
    assert (error.num_finished, error.num_requests) == (3, 4), error
    print(f"rank {rank}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
