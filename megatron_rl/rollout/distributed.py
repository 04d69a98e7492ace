"""One rollout engine a rank, behind one interface: each samples its share, and all get the whole.

Every rank of the job holds a colocated engine (or, with rollout TP, a part of one), whatever the
training layout is. A call is a collective: each engine takes the prompts whose number falls to it,
and the completions are gathered, so that every rank returns the same list. A sample's seed depends
on its prompt's number in the whole call, so the number of engines changes nothing that is sampled
beyond the rounding of batches.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.precision.audit import ModelReport
from megatron_rl.rollout.types import Completion, Engine, RolloutTimeout, Sampling


class DistributedEngine(Engine):
    """The engines of all ranks as one."""

    def __init__(self, local: Engine, tp_size: int) -> None:
        """Wraps this rank's engine.

        Args:
            local: Engine of this rank; ``tp_size`` consecutive ranks share one.
            tp_size: Rollout tensor-parallel size.

        Raises:
            ValueError: The ranks cannot be divided into engines.
        """
        world = dist.get_world_size()
        if world % tp_size:
            raise ValueError(
                f"rollout.tensor_parallel_size={tp_size} does not divide the {world} ranks; choose "
                "a divisor"
            )
        self._local = local
        self._tp_size = tp_size
        self._num_engines = world // tp_size
        self._engine = dist.get_rank() // tp_size

    @property
    def version(self) -> int:
        """Version of the weights in force."""
        return self._local.version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_indices: Sequence[int] | None = None,
    ) -> list[Completion]:
        """See :meth:`Engine.generate`; every rank passes the same prompts."""
        numbers = list(range(len(prompts)) if prompt_indices is None else prompt_indices)
        share = range(self._engine, len(prompts), self._num_engines)
        ours: list[Completion] = []
        late: RolloutTimeout | None = None
        if len(share):
            try:
                ours = self._local.generate(
                    [prompts[i] for i in share], sampling, [numbers[i] for i in share]
                )
            except RolloutTimeout as error:
                late = error
        gathered = self._gather(ours, late)
        # The ranks of one engine return the same completions; the first one's count.
        whole = [c for rank in range(0, len(gathered), self._tp_size) for c in gathered[rank]]
        place = {number: i for i, number in enumerate(numbers)}
        return sorted(whole, key=lambda c: (place[c.prompt_index], c.sample_index))

    def _gather(
        self, ours: list[Completion], late: RolloutTimeout | None
    ) -> list[list[Completion]]:
        """Every rank's completions; where one engine was late, all ranks say so and none hangs."""
        num_finished = len(ours) if late is None else late.num_finished
        num_requests = len(ours) if late is None else late.num_requests
        limit_s = None if late is None else late.limit_s
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (ours, num_finished, num_requests, limit_s))
        limits = [limit for *_, limit in gathered if limit is not None]
        if limits:
            # The ranks of one engine count the same responses; the first one's count.
            engines = gathered[:: self._tp_size]
            finished, requests = (sum(engine[i] for engine in engines) for i in (1, 2))
            raise RolloutTimeout(finished, requests, limits[0])
        return [completions for completions, *_ in gathered]

    def update_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See :meth:`Engine.update_weights`; all ranks consume the stream in step."""
        self._local.update_weights(stream, version)

    def report(self) -> ModelReport:
        """See :meth:`Engine.report`; of this rank's engine."""
        return self._local.report()

    def close(self) -> None:
        """Frees this rank's engine."""
        self._local.close()
