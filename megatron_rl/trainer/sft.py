"""Supervised fine-tuning: token-mean cross-entropy over the responses.

The same policy, packing, checkpoints and records as reinforcement learning; what differs is here:
the parts of a run, its objective and its loop. A rollout engine exists only to answer held-out
prompts. Deliberately no entropy and no per-token accuracy: both need more than the log-prob of the
target, for numbers that the loss already tells.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.algorithms.aggregation import token_weights
from megatron_rl.config.sft import SFTConfig
from megatron_rl.data.examples import Example, load_examples
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.policy.packing import PromptGroup, Response
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.policy import Policy
from megatron_rl.precision import flow_of
from megatron_rl.rewards.manager import RewardManager
from megatron_rl.rollout import Engine
from megatron_rl.trainer.components import Inputs, build_engine, build_policy, read_model
from megatron_rl.trainer.loop import (
    TrainerState,
    checkpoint_is_due,
    evaluation_is_due,
    run_evaluation,
    sync,
)
from megatron_rl.trainer.recorder import RunRecorder
from megatron_rl.trainer.step_metrics import optimizer_metrics, peak_rss_gib
from megatron_rl.trainer.timing import Timings


@dataclass(frozen=True, kw_only=True)
class SFTComponents:
    """The parts of a run; named as in :class:`megatron_rl.trainer.components.Components`."""

    config: SFTConfig
    inputs: Inputs
    loader: PromptLoader[Example]
    policy: Policy
    engine: Engine | None
    """Answers held-out prompts; None without any."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The loss of a batch, ``-sum_t w_t * logprob_t``; B and S are those of the batch."""

    weights: torch.Tensor
    """``[B, S]`` float32; zero in padding."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> torch.Tensor:
        """This micro-batch's share of the loss, as ``policy.execution.Objective`` defines it."""
        weights = self.weights[rows.cpu(), columns.cpu()].to(logprobs.device)
        # 0 * NaN is NaN: what has no weight is replaced, not multiplied away.
        return -(weights * logprobs.masked_fill(weights == 0, 0.0)).sum()


def load_sft_inputs(config: SFTConfig, model_path: Path) -> Inputs:
    """Loads and checks everything that a run reads.

    Raises:
        ValueError: The model, a data source, the template or the reward function is not usable.
    """
    spec, eos = read_model(model_path)
    longest = config.max_sequence_length_tokens
    if longest > spec.max_position_embeddings:
        raise ValueError(
            f"data.max_sequence_length_tokens={longest} exceeds the model's "
            f"{spec.max_position_embeddings} positions; lower it"
        )
    tokenizer = load_tokenizer(model_path)
    train, val = load_examples(
        config.data,
        tokenizer,
        response_end(tokenizer, eos),
        max_answer_length_tokens=config.evaluation.max_response_length_tokens,
    )
    return Inputs(
        model_path=model_path,
        spec=spec,
        eos_token_ids=eos,
        # Nothing is sampled to train on: no operator needs the bits of a rollout engine's.
        flow=replace(flow_of(config.precision), shared_operators=()),
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.stop_token_ids(config.evaluation.stop),
        train_prompts=list(train),
        val_prompts=val,
        rewards=RewardManager(config.reward),
    )


def response_end(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> int:
    """The EOS that ends a response: of several, the one that the tokenizer ends a turn with."""
    preferred = tokenizer.eos_token_id
    return preferred if preferred in eos_token_ids else eos_token_ids[0]


def build_sft_components(
    config: SFTConfig, inputs: Inputs, layout: ParallelLayout
) -> SFTComponents:
    """Builds policy and loader, and an engine when there are held-out prompts.

    Raises:
        ValueError: Something does not fit: the checkpoint, the parallel sizes, an engine option.
    """
    examples = [prompt for prompt in inputs.train_prompts if isinstance(prompt, Example)]
    assert len(examples) == len(inputs.train_prompts), "inputs are those of load_sft_inputs"
    policy = build_policy(config.policy, inputs, layout, config.trainer.total_steps)
    return SFTComponents(
        config=config,
        inputs=inputs,
        loader=PromptLoader(
            examples, config.data.batch_size_sequences, config.seed, config.data.shuffle
        ),
        policy=policy,
        engine=build_engine(config, inputs, layout) if inputs.val_prompts else None,
    )


def fine_tune(parts: SFTComponents, state: TrainerState, recorder: RunRecorder) -> None:
    """Runs the remaining steps.

    Raises:
        NonFiniteError: The loss or gradient norm left the finite numbers; names the step.
    """
    config = parts.config
    if state.step == 0 and config.evaluation.at_start:
        _evaluate(parts, state.step, recorder, Timings())
    while state.step < config.trainer.total_steps:
        step = state.step + 1
        timings = Timings()
        with timings.measure("step"):
            examples = parts.loader.next_batch()
            try:
                with timings.measure("update_actor"):
                    metrics = learn(parts.policy, examples)
            except NonFiniteError as error:
                raise NonFiniteError(
                    f"step {step}: {error}; nothing of this step was saved. Continue from the last "
                    "checkpoint with a lower policy.optimizer.lr"
                ) from error
        state.step = step
        recorder.log(step, metrics | _throughput(metrics, timings))
        if evaluation_is_due(config, step):
            _evaluate(parts, step, recorder, timings)
        if checkpoint_is_due(config, step):
            recorder.save(step)


def learn(policy: Policy, examples: Sequence[Example]) -> dict[str, float]:
    """One optimizer step on a batch of examples.

    Returns:
        Metrics ``sft/*`` (the loss before the step, in nats per response token), ``actor/*``,
        lengths and token counts.
    """
    lengths = torch.tensor([len(example.response_ids) for example in examples])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    weights = token_weights(
        mask,
        "token-mean",
        total_tokens=int(lengths.sum()),
        total_sequences=len(examples),
    )
    groups = [
        PromptGroup(
            prompt_ids=example.token_ids,
            responses=(Response(row=row, token_ids=example.response_ids),),
        )
        for row, example in enumerate(examples)
    ]
    result = policy.update(
        groups,
        (mask.shape[0], mask.shape[1]),
        CrossEntropy(weights=weights),
        temperature=1.0,
        with_entropy=False,
    )
    loss = result.values.loss
    losses = {
        "sft/loss": loss,
        "sft/perplexity": math.exp(min(loss, 700.0)),  # exp(710) overflows
    }
    prompt_tokens = sum(len(example.token_ids) for example in examples)
    return (losses if math.isfinite(loss) else {}) | {
        **optimizer_metrics(result),
        "response_length/mean": lengths.float().mean().item(),
        "perf/update_num_tokens": float(result.values.num_tokens),
        "perf/total_num_tokens": float(prompt_tokens + int(lengths.sum())),
    }


def _throughput(metrics: dict[str, float], timings: Timings) -> dict[str, float]:
    seconds = timings.seconds
    return timings.metrics() | {
        "perf/update_tokens_per_s": metrics["perf/total_num_tokens"] / seconds["update_actor"],
        "perf/time_per_step": seconds["step"],
        "perf/rss_gib": peak_rss_gib(),
    }


def _evaluate(parts: SFTComponents, step: int, recorder: RunRecorder, timings: Timings) -> None:
    if parts.engine is None:
        return
    sync(parts, step)
    run_evaluation(parts, step, recorder, timings)
