"""A rollout batch: prompts, responses, rewards and advantages, as tensors of one shape.

Row ``b`` of every ``[B, S]`` tensor is one response; rows of a prompt are adjacent, but nothing
relies on it: groups are told apart by ``group_ids``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algorithms.advantages import Advantages, get_estimator
from megatron_rl.config import AlgorithmConfig
from megatron_rl.data.types import TokenizedPrompt
from megatron_rl.policy.packing import PromptGroup, Response
from megatron_rl.rewards.interface import RewardResult
from megatron_rl.rollout import Completion


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Everything of one step that the update reads; B responses, S longest response in tokens."""

    prompts: tuple[TokenizedPrompt, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[RewardResult, ...]
    scores: torch.Tensor
    """``[B]`` float32 rewards."""
    group_ids: torch.Tensor
    """``[B]`` int64 index of each response's prompt."""
    advantages: Advantages
    """``[B]`` values and the counts of groups without signal."""
    response_mask: torch.Tensor
    """``[B, S]`` bool: every response token."""
    loss_mask: torch.Tensor
    """``[B, S]`` bool: tokens that the loss averages over."""
    rollout_logprobs: torch.Tensor
    """``[B, S]`` float32 as sampled; 0 in padding."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, S)``."""
        return self.response_mask.shape[0], self.response_mask.shape[1]

    @property
    def lengths(self) -> torch.Tensor:
        """``[B]`` int64 response lengths, in tokens."""
        return self.response_mask.sum(dim=1)

    def groups(self, rows: torch.Tensor) -> list[PromptGroup]:
        """Prompt groups that hold the given rows, in prompt order.

        Args:
            rows: ``[B]`` bool, rows to include.
        """
        chosen = rows.nonzero().flatten().tolist()
        return prompt_groups([p.token_ids for p in self.prompts], self.completions, chosen)


def prompt_groups(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], rows: Iterable[int]
) -> list[PromptGroup]:
    """Completions of the given rows, grouped by prompt, in prompt order."""
    wanted: dict[int, list[Response]] = {}
    for row in rows:
        completion = completions[row]
        wanted.setdefault(completion.prompt_index, []).append(
            Response(row=row, token_ids=completion.token_ids)
        )
    return [
        PromptGroup(prompt_ids=prompts[index], responses=tuple(wanted[index]))
        for index in sorted(wanted)
    ]


def make_batch(
    prompts: Sequence[TokenizedPrompt],
    completions: Sequence[Completion],
    rewards: Sequence[RewardResult],
    config: AlgorithmConfig,
) -> RolloutBatch:
    """Assembles a batch and estimates advantages.

    Raises:
        ValueError: A response is empty, or counts of completions and rewards differ.
    """
    if len(completions) != len(rewards):
        raise ValueError(f"{len(completions)} completions but {len(rewards)} rewards")
    longest = max(len(c.token_ids) for c in completions)
    response_mask = torch.zeros(len(completions), longest, dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(completions), longest)
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        if not length:
            raise ValueError(f"response {row} is empty; the engine must return at least EOS")
        response_mask[row, :length] = True
        rollout_logprobs[row, :length] = torch.tensor(completion.logprobs)
    scores = torch.tensor([reward.score for reward in rewards], dtype=torch.float32)
    group_ids = torch.tensor([c.prompt_index for c in completions], dtype=torch.int64)
    loss_mask = response_mask
    if config.mask_truncated:
        truncated = torch.tensor([c.truncated for c in completions])
        loss_mask = response_mask & ~truncated[:, None]
    return RolloutBatch(
        prompts=tuple(prompts),
        completions=tuple(completions),
        rewards=tuple(rewards),
        scores=scores,
        group_ids=group_ids,
        advantages=get_estimator(config.advantage_estimator)(scores, group_ids),
        response_mask=response_mask,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
    )
