"""Runs vLLM's engine over queued requests, until all are done or the time is up.

The same loop as ``vllm.LLM.generate``, which has no time limit, with one look at the clock between
engine steps. A step that never returns is not seen here: the other ranks' collectives end that.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.rollout.types import RolloutTimeout

STEPS_PER_AGREEMENT = 8
"""Engine steps between two agreements of the ranks of one engine, which cost a small all-reduce."""


def run_requests(
    llm: Any, request_ids: Sequence[str], limit_s: float, group: dist.ProcessGroup | None
) -> list[Any]:
    """Drives ``llm`` until its queued requests are done.

    Args:
        llm: A ``vllm.LLM`` whose queue holds these requests and no other.
        request_ids: What ``llm.enqueue`` returned.
        limit_s: Time limit, in seconds from now.
        group: CPU group of the ranks that share the engine; None for an engine of one rank.

    Returns:
        ``vllm.RequestOutput`` of each request, in the order of ``request_ids``.

    Raises:
        RolloutTimeout: The limit passed. The unfinished requests are dropped, on every rank of the
            engine after the same step, so that it can be used again.
    """
    engine = llm.llm_engine
    is_over = _deadline(limit_s, group)
    outputs = []
    while engine.has_unfinished_requests():
        if is_over():
            engine.abort_request(list(request_ids), internal=True)
            while engine.has_unfinished_requests():
                engine.step()
            raise RolloutTimeout(len(outputs), len(request_ids), limit_s)
        outputs += [output for output in engine.step() if output.finished]
    return sorted(outputs, key=lambda output: int(output.request_id))


def _deadline(limit_s: float, group: dist.ProcessGroup | None) -> Callable[[], bool]:
    """A function, called before each step, that says whether to stop.

    The ranks of an engine step together, and their clocks differ: one that stopped alone would
    leave the others in a collective. Once any is over its limit, all stop at the next agreement.
    """
    end = monotonic() + limit_s
    if group is None:
        return lambda: monotonic() > end
    steps = 0

    def agreed() -> bool:
        nonlocal steps
        steps += 1
        if (steps - 1) % STEPS_PER_AGREEMENT:
            return False
        over = torch.tensor([monotonic() > end], dtype=torch.int32)
        dist.all_reduce(over, op=dist.ReduceOp.MAX, group=group)
        return bool(over.item())

    return agreed
