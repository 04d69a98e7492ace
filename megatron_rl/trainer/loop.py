"""The training loop: sample, score, update, sync - the whole algorithm on one page."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.config import RunConfig
from megatron_rl.config.sft import SFTConfig
from megatron_rl.metrics.gate import GateFinding
from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.rollout import NonFiniteWeights, RolloutTimeout, Sampling, derive_seed
from megatron_rl.sync import stream_weights
from megatron_rl.trainer.audit import require_contained
from megatron_rl.trainer.batch import RolloutBatch, make_batch
from megatron_rl.trainer.components import Components, RunParts
from megatron_rl.trainer.evaluation import Evaluation, evaluate, score_completions
from megatron_rl.trainer.flow_status import gate_bound, run_exactness
from megatron_rl.trainer.gate import MismatchGate
from megatron_rl.trainer.step_metrics import batch_metrics, throughput_metrics
from megatron_rl.trainer.timing import Timings
from megatron_rl.trainer.update import update_policy


class Recorder(Protocol):
    """Where a run's results go; see :class:`megatron_rl.trainer.recorder.RunRecorder`."""

    def step(
        self, step: int, metrics: dict[str, float], batch: RolloutBatch, texts: list[str]
    ) -> None:
        """Records one training step."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Records one evaluation."""

    def gate(self, finding: GateFinding) -> None:
        """Records what the mismatch gate found."""

    def save(self, step: int) -> None:
        """Saves a checkpoint of everything that :func:`train` continues from."""


@dataclass
class TrainerState:
    """What changes from step to step outside the policy."""

    step: int = 0
    """Steps that are done."""


def train(parts: Components, state: TrainerState, recorder: Recorder) -> None:
    """Runs the remaining steps.

    Raises:
        NonFiniteError: The loss or gradient norm left the finite numbers; names the step.
        TimeoutError: Sampling exceeded its limit; names the step.
        MismatchError: ``precision.gate=stop`` and the first step is over the bound.
    """
    config = parts.config
    gate = mismatch_gate(parts, recorder)
    sync(parts, state.step)
    require_contained(parts.policy, parts.engine)
    if state.step == 0 and config.evaluation.at_start:
        run_evaluation(parts, state.step, recorder, Timings())
    while state.step < config.trainer.total_steps:
        step = state.step + 1
        timings = Timings()
        with timings.measure("step"):
            prompts = parts.loader.next_batch()
            with timings.measure("gen"):
                sampling = training_sampling(parts, step)
                with late_sampling_named(f"step {step}"):
                    completions = parts.engine.generate([p.token_ids for p in prompts], sampling)
            with timings.measure("reward"):
                texts, rewards = score_completions(
                    prompts, completions, parts.inputs.tokenizer, parts.inputs.rewards
                )
            batch = make_batch(prompts, completions, rewards, config.algorithm)
            try:
                metrics = update_policy(
                    parts.policy,
                    parts.reference,
                    batch,
                    config,
                    timings,
                    inspect=functools.partial(gate.inspect, step, batch),
                    inspect_first=gate.looks_first,
                )
                with timings.measure("sync"):
                    sync(parts, step)
            except (NonFiniteError, NonFiniteWeights) as error:
                raise NonFiniteError(
                    f"step {step}: {error}; nothing of this step was saved. Continue from the last "
                    "checkpoint with a lower policy.optimizer.lr, or look at rollouts/ for rewards "
                    "that explode"
                ) from error
        state.step = step
        metrics |= batch_metrics(batch) | throughput_metrics(batch, metrics, timings)
        recorder.step(step, metrics, batch, texts)
        if evaluation_is_due(config, step):
            run_evaluation(parts, step, recorder, timings)
        if checkpoint_is_due(config, step):
            recorder.save(step)


def mismatch_gate(parts: Components, recorder: Recorder) -> MismatchGate:
    """The gate of a run; the next step that it inspects is its first."""
    config, flow, tokenizer = parts.config, parts.inputs.flow, parts.inputs.tokenizer
    return MismatchGate(
        mode=config.precision.gate,
        bound=gate_bound(config, flow),
        exact=run_exactness(config, flow).claimed,
        token_text=lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
        record=recorder.gate,
    )


def evaluation_is_due(config: RunConfig | SFTConfig, step: int) -> bool:
    """Whether a finished step is followed by an evaluation."""
    interval = config.evaluation.interval_steps
    return step == config.trainer.total_steps or bool(interval and step % interval == 0)


def checkpoint_is_due(config: RunConfig | SFTConfig, step: int) -> bool:
    """Whether a finished step is followed by a checkpoint."""
    trainer = config.trainer
    if step == trainer.total_steps:
        return trainer.save_final_checkpoint
    return bool(trainer.save_interval_steps and step % trainer.save_interval_steps == 0)


def training_sampling(parts: Components, step: int) -> Sampling:
    """How the responses of a step are sampled: seeded by run and step."""
    rollout = parts.config.rollout
    seeded = rollout.seed_mode == "per_request"
    return Sampling(
        n=rollout.n,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_length_tokens,
        stop_token_ids=parts.inputs.stop_token_ids,
        ignore_eos=rollout.ignore_eos,
        seed=derive_seed(parts.config.seed, "rollout", step) if seeded else None,
    )


@contextmanager
def late_sampling_named(what: str) -> Iterator[None]:
    """Says what it was that exceeded the time limit of sampling."""
    try:
        yield
    except RolloutTimeout as error:
        raise TimeoutError(f"{what}: {error}") from error


def sync(parts: RunParts, version: int) -> None:
    """Hands the policy's weights to the engine."""
    assert parts.engine is not None
    parts.engine.update_weights(stream_weights(parts.policy, parts.inputs.flow), version)


def run_evaluation(parts: RunParts, step: int, recorder: Recorder, timings: Timings) -> None:
    """Evaluates on the held-out prompts, if there are any."""
    if not parts.inputs.val_prompts:
        return
    assert parts.engine is not None
    with timings.measure("eval"), late_sampling_named(f"evaluation after step {step}"):
        evaluation = evaluate(
            step,
            parts.inputs.val_prompts,
            parts.engine,
            parts.inputs.tokenizer,
            parts.inputs.rewards,
            parts.config,
            parts.inputs.stop_token_ids,
        )
    evaluation.metrics["timing_s/eval"] = timings.seconds["eval"]
    recorder.evaluation(step, evaluation)
