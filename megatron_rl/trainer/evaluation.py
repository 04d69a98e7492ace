"""Held-out evaluation: greedy answers, and means over several samples when asked.

Metrics are ``val-core/<source>/{reward,acc}/mean`` for greedy decoding and ``.../mean@k`` for
sampling; the greedy answers to all rows are kept, in row order, so that those before and after
training pair up.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.config.sft import SFTConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import TokenizedPrompt
from megatron_rl.metrics import Rollout
from megatron_rl.rewards.interface import RewardRequest, RewardResult
from megatron_rl.rewards.manager import RewardManager
from megatron_rl.rollout import Completion, Engine, Sampling, derive_seed


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of one evaluation."""

    metrics: dict[str, float]
    rollouts: list[Rollout]


def score_completions(
    prompts: Sequence[TokenizedPrompt],
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
    rewards: RewardManager,
) -> tuple[list[str], list[RewardResult]]:
    """Texts and rewards of completions, in order."""
    texts = [tokenizer.decode(c.token_ids) for c in completions]
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    # A reward may fail by time: one rank decides, so that all train on the same numbers.
    decided: list[list[RewardResult] | None] = [None]
    if not is_shared or dist.get_rank() == 0:
        decided[0] = rewards.score(_requests(prompts, completions, texts))
    if is_shared:
        dist.broadcast_object_list(decided, src=0)
    assert decided[0] is not None
    return texts, decided[0]


def _requests(
    prompts: Sequence[TokenizedPrompt], completions: Sequence[Completion], texts: Sequence[str]
) -> list[RewardRequest]:
    requests = []
    for completion, text in zip(completions, texts, strict=True):
        row = prompts[completion.prompt_index].row
        requests.append(
            RewardRequest(
                data_source=row.data_source,
                response=text,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
            )
        )
    return requests


def rollout_record(
    step: int,
    prompt: TokenizedPrompt,
    completion: Completion,
    text: str,
    reward: RewardResult,
    *,
    advantage: float | None = None,
    mode: str | None = None,
) -> Rollout:
    """A rollout as it is kept in the run directory."""
    return Rollout(
        step=step,
        data_source=prompt.row.data_source,
        prompt=prompt.text,
        response=text,
        ground_truth=prompt.row.ground_truth,
        score=reward.score,
        accuracy=reward.accuracy,
        truncated=completion.truncated,
        response_length_tokens=len(completion.token_ids),
        advantage=advantage,
        mode=mode,  # type: ignore[arg-type]
    )


def evaluate(
    step: int,
    prompts: Sequence[TokenizedPrompt],
    engine: Engine,
    tokenizer: Tokenizer,
    rewards: RewardManager,
    config: RunConfig | SFTConfig,
    stop_token_ids: tuple[int, ...],
) -> Evaluation:
    """Evaluates the engine's policy on held-out prompts.

    Args:
        step: Trainer step, for the records only: evaluations of the same policy agree.
        prompts: Held-out prompts.
        engine: Rollout engine with the policy's weights.
        tokenizer: Decodes responses.
        rewards: Scores them.
        config: Evaluation and rollout settings.
        stop_token_ids: Tokens that end a response besides EOS.
    """
    metrics: dict[str, float] = {}
    rollouts: list[Rollout] = []
    settings = config.evaluation
    modes = []
    if settings.greedy:
        modes.append(("greedy", 1, 0.0, ""))
    if settings.num_samples:
        n = settings.num_samples
        modes.append(("sampled", n, settings.temperature, f"@{n}"))
    for mode, n, temperature, suffix in modes:
        sampling = Sampling(
            n=n,
            temperature=temperature,
            max_tokens=config.rollout.max_response_length_tokens,
            stop_token_ids=stop_token_ids,
            seed=derive_seed(config.seed, "evaluation"),
        )
        completions = engine.generate([p.token_ids for p in prompts], sampling)
        texts, results = score_completions(prompts, completions, tokenizer, rewards)
        scores: dict[str, list[float]] = defaultdict(list)
        accuracies: dict[str, list[float]] = defaultdict(list)
        for completion, text, result in zip(completions, texts, results, strict=True):
            prompt = prompts[completion.prompt_index]
            scores[prompt.row.data_source].append(result.score)
            if result.accuracy is not None:
                accuracies[prompt.row.data_source].append(result.accuracy)
            rollouts.append(rollout_record(step, prompt, completion, text, result, mode=mode))
        for name, values in (("reward", scores), ("acc", accuracies)):
            for source, numbers in values.items():
                key = f"val-core/{source}/{name}/mean{suffix}"
                metrics[key] = sum(numbers) / len(numbers)
    return Evaluation(metrics=metrics, rollouts=rollouts)
