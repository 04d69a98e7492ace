"""Runs micro-batches of packed prompt groups through the model, forward or forward and backward.

One path for every parallel layout: Megatron's schedule function drives one rank or a pipeline, and
the per-token results of all micro-batches, stages and data-parallel ranks end as ``[B, S]`` tensors
that are the same on every rank. The loss is a callable handed in by the caller; this file knows no
algorithm.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.data.micro_batches import plan_for_ranks
from megatron_rl.policy.packing import PackedGroups, PromptGroup, pack_groups, split_groups
from megatron_rl.policy.parallel import ParallelLayout


class Objective(Protocol):
    """A loss over the tokens of one micro-batch."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> torch.Tensor:
        """This micro-batch's share of the global mini-batch loss.

        Args:
            logprobs: ``[R]`` float32 with gradient.
            entropy: ``[R]`` float32 with gradient.
            rows: ``[R]`` int64, batch row of each token.
            columns: ``[R]`` int64, position of each token in its response.

        Returns:
            A scalar; shares of all micro-batches and ranks add up to the loss.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """Per-token results of a pass over a batch."""

    logprobs: torch.Tensor
    """``[B, S]`` float32; zero where no token was computed."""
    entropy: torch.Tensor
    """``[B, S]`` float32; likewise."""
    loss: float
    """Sum of the objective over all micro-batches and ranks; 0 without an objective."""
    num_tokens: int
    """Tokens that went through the model, over all data-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How a pass is cut into micro-batches and read out."""

    micro_batch_tokens: int
    share_prefix: bool
    chunk_tokens: int
    temperature: float
    with_entropy: bool
    pad_to_multiple: int


def run_groups(
    chunks: Sequence[torch.nn.Module],
    groups: Sequence[PromptGroup],
    shape: tuple[int, int],
    layout: ParallelLayout,
    options: ExecutionOptions,
    objective: Objective | None = None,
) -> TokenValues:
    """Passes prompt groups through the model; with an objective, accumulates gradients.

    Args:
        chunks: The model's chunks on this rank (one, without virtual pipeline stages).
        groups: All groups of the batch, the same on every rank.
        shape: ``(B, S)`` of the results.
        layout: This rank's place.
        options: Micro-batching and head options.
        objective: The loss; None runs forward only, without gradients.
    """
    assert len(chunks) == 1, "virtual pipeline stages"
    units = split_groups(groups, share_prefix=options.share_prefix)
    plan = plan_for_ranks(
        [unit.num_tokens for unit in units], layout.dp_size, options.micro_batch_tokens
    )
    device = next(chunks[0].parameters()).device
    micro_batches = [
        pack_groups([units[i] for i in indices], pad_to_multiple=options.pad_to_multiple).to(device)
        for indices in plan[layout.dp_rank]
    ]
    num_micro_batches = len(micro_batches)
    values = _Collector(shape)
    if num_micro_batches:
        get_forward_backward_func()(
            forward_step_func=_forward_step(options, objective, values),
            data_iterator=iter(micro_batches),
            model=list(chunks),
            num_microbatches=num_micro_batches,
            seq_length=1,  # variable; the pipeline sends shapes
            micro_batch_size=1,
            forward_only=objective is None,
        )
    num_tokens = sum(unit.num_tokens for unit in units)
    return values.reduced(layout, num_tokens)


class _Collector:
    """Per-token results of this rank, gathered while micro-batches run."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.logprobs = torch.zeros(shape)
        self.entropy = torch.zeros(shape)
        self.loss = torch.zeros((), dtype=torch.float64)

    def add(
        self,
        packed: PackedGroups,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        loss: torch.Tensor,
    ) -> None:
        place = packed.rows.cpu(), packed.columns.cpu()
        self.logprobs[place] = logprobs.detach().cpu()
        self.entropy[place] = entropy.detach().cpu()
        self.loss += loss.detach().double().cpu()

    def reduced(self, layout: ParallelLayout, num_tokens: int) -> TokenValues:
        """Completes the results over stages and DP ranks: each token is in exactly one."""
        ps = parallel_state
        for size, group in (
            (layout.pp_size, ps.get_pipeline_model_parallel_group),
            (layout.dp_size, ps.get_data_parallel_group),
        ):
            if size > 1:
                for tensor in (self.logprobs, self.entropy, self.loss):
                    dist.all_reduce(tensor, group=group())
        return TokenValues(
            logprobs=self.logprobs,
            entropy=self.entropy,
            loss=self.loss.item(),
            num_tokens=num_tokens,
        )


def _forward_step(
    options: ExecutionOptions, objective: Objective | None, values: _Collector
) -> Callable[[Iterator[PackedGroups], Any], tuple[Any, Callable[..., Any]]]:
    """Megatron's ``forward_step_func``: one micro-batch and the function that makes its loss."""

    def step(iterator: Iterator[PackedGroups], model: Any) -> tuple[Any, Callable[..., Any]]:
        packed = next(iterator)
        output = model(
            packed.input_ids,
            packed.position_ids,
            packed=packed,
            temperature=options.temperature,
            chunk_tokens=options.chunk_tokens,
            with_entropy=options.with_entropy,
        )

        def loss(
            outputs: tuple[torch.Tensor, torch.Tensor],
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            logprobs, entropy = outputs
            if objective is None or not len(logprobs):
                total = logprobs.sum() * 0.0
            else:
                total = objective(logprobs, entropy, packed.rows, packed.columns)
            values.add(packed, logprobs, entropy, total)
            # The token count is unused: the objective is normalised over the global mini-batch.
            return total, torch.ones((), dtype=torch.int, device=logprobs.device), {}

        return output, loss

    return step
