"""Evaluates a policy, or samples from it, without training it.

The policy is a Hugging Face directory, which the engine reads by itself, or a training checkpoint,
which is loaded into the policy and passed to the engine as in training; both give the answers that
a run would give. The caller has set the environment before this module is imported.

Nothing here writes a run directory, and one is only read.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.hf import HFReader
from megatron_rl.config import RewardConfig, RunConfig
from megatron_rl.data.prompts import tokenize_rows
from megatron_rl.data.types import PromptRow
from megatron_rl.models import linear_plan, parameter_map
from megatron_rl.policy import parallel
from megatron_rl.policy.checkpoint import load_checkpoint, read_manifest
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.rollout import Engine, Sampling
from megatron_rl.sync import stream_checkpoint, stream_weights
from megatron_rl.trainer.components import Inputs, build_engine, build_policy, load_inputs
from megatron_rl.trainer.evaluation import evaluate

logger = logging.getLogger(__name__)

Prompt = str | tuple[dict[str, str], ...]
"""Text, or chat messages."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How ``generate`` samples."""

    n: int = 1
    """Samples per prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    seed: int = 0
    """The seed of a sample follows from it, its prompt's place and its own."""
    use_chat_template: bool = False
    """Wrap text prompts as a user message; message lists always go through the template."""


def evaluate_model(
    config: RunConfig,
    model_path: Path,
    checkpoint: Path | None,
    quiet: Callable[[], AbstractContextManager[None]],
) -> dict[str, Any] | None:
    """Evaluates on the recipe's held-out prompts.

    Args:
        config: The recipe; its training data are not read.
        model_path: Hugging Face directory: the policy, or what ``checkpoint`` was trained from.
        checkpoint: A ``global_step_N`` directory.
        quiet: Context manager that silences third-party libraries.

    Returns:
        JSON-able: ``model``, ``checkpoint``, ``step``, ``flow``, ``num_prompts`` and ``metrics``
        (``val-core/...``, as in training). None on ranks other than 0.

    Raises:
        ValueError: Something about the input is wrong.
    """
    if not config.data.val:
        raise ValueError("the recipe has no held-out prompts to evaluate on; set data.val")
    if not (config.evaluation.greedy or config.evaluation.num_samples):
        raise ValueError(
            "evaluation.greedy=false and evaluation.num_samples=0 leave nothing to evaluate; "
            "change one of them"
        )
    step = _step(checkpoint)
    inputs = load_inputs(_with_data(config, train=()), model_path)
    try:
        with _served(config, inputs, checkpoint, quiet) as engine, quiet():
            evaluation = evaluate(
                step or 0,
                inputs.val_prompts,
                engine,
                inputs.tokenizer,
                inputs.rewards,
                config,
                inputs.stop_token_ids,
            )
    finally:
        inputs.rewards.close()
    if not _is_writer():
        return None
    return {
        "model": config.model.path,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "step": step,
        "flow": inputs.flow.name,
        "num_prompts": len(inputs.val_prompts),
        "metrics": evaluation.metrics,
    }


def generate_responses(
    config: RunConfig,
    model_path: Path,
    checkpoint: Path | None,
    prompts: Sequence[Prompt],
    options: GenerationOptions,
    quiet: Callable[[], AbstractContextManager[None]],
) -> list[dict[str, Any]] | None:
    """Samples responses to prompts.

    Args:
        config: The recipe: precision, limits, stop strings and engine; its data are not read.
        model_path: Hugging Face directory: the policy, or what ``checkpoint`` was trained from.
        checkpoint: A ``global_step_N`` directory.
        prompts: At least one.
        options: How to sample.
        quiet: Context manager that silences third-party libraries.

    Returns:
        JSON-able rows, ordered by prompt, then sample: ``prompt`` (as given), ``response``,
        ``token_ids`` (stop token included), ``logprobs`` (of each token, under the sampled
        distribution) and ``finish_reason`` (``stop`` or ``length``). None on ranks other than 0.

    Raises:
        ValueError: Something about the input is wrong.
    """
    _step(checkpoint)
    bare = _with_data(config, train=(), val=()).model_copy(update={"reward": RewardConfig()})
    inputs = load_inputs(bare, model_path)
    rows = [
        PromptRow(index=index, data_source="prompts", prompt=prompt, ground_truth="")
        for index, prompt in enumerate(prompts)
    ]
    tokenized = tokenize_rows(
        rows,
        inputs.tokenizer,
        max_length_tokens=config.data.max_prompt_length_tokens,
        use_chat_template=options.use_chat_template,
    )
    sampling = Sampling(
        n=options.n,
        temperature=options.temperature,
        max_tokens=config.rollout.max_response_length_tokens,
        stop_token_ids=inputs.stop_token_ids,
        ignore_eos=config.rollout.ignore_eos,
        seed=options.seed,
    )
    with _served(config, inputs, checkpoint, quiet) as engine, quiet():
        completions = engine.generate([prompt.token_ids for prompt in tokenized], sampling)
    if not _is_writer():
        return None
    return [
        {
            "prompt": prompts[completion.prompt_index],
            "response": inputs.tokenizer.decode(completion.token_ids),
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }
        for completion in completions
    ]


def one_process(config: RunConfig) -> RunConfig:
    """The recipe without its parallel sizes: what trains on many ranks is served by one process."""
    policy = config.policy.model_copy(
        update={
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "sequence_parallel": False,
        }
    )
    rollout = config.rollout.model_copy(update={"tensor_parallel_size": 1})
    return config.model_copy(update={"policy": policy, "rollout": rollout})


@contextmanager
def _served(
    config: RunConfig,
    inputs: Inputs,
    checkpoint: Path | None,
    quiet: Callable[[], AbstractContextManager[None]],
) -> Iterator[Engine]:
    """The policy behind an engine, until the block ends.

    Under a launcher the recipe's parallel sizes hold; otherwise one process serves it whole.
    """
    if "RANK" not in os.environ:
        config = one_process(config)
    engine: Engine | None = None
    try:
        with quiet():
            layout = parallel.initialize(
                config.policy, config.seed, timeout_s=config.trainer.collective_timeout_s
            )
            engine = _start_engine(config, inputs, checkpoint, layout)
        yield engine
    finally:
        # Leaving the process group writes notes of its own.
        with quiet():
            if engine is not None:
                engine.close()
            parallel.shutdown()


def _start_engine(
    config: RunConfig, inputs: Inputs, checkpoint: Path | None, layout: ParallelLayout
) -> Engine:
    if checkpoint is None:
        engine = build_engine(config, inputs, layout)
        if inputs.flow.serves_quantised:
            parameters = parameter_map(inputs.spec)
            plan = linear_plan(parameters, inputs.flow)
            reader = HFReader(inputs.model_path)
            engine.update_weights(
                stream_checkpoint(reader, parameters.hf_shapes, inputs.flow, plan), 0
            )
        return engine
    steps = config.trainer.total_steps * config.optimizer_steps_per_rollout
    policy = build_policy(config.policy, inputs, layout, steps)
    trainer = load_checkpoint(checkpoint, policy)
    trained = build_engine(config, inputs, layout)
    trained.update_weights(stream_weights(policy, inputs.flow), int(trainer["step"]))
    return trained


def _step(checkpoint: Path | None) -> int | None:
    """Trainer step of a checkpoint, whose manifest is checked before anything heavy starts."""
    return None if checkpoint is None else int(read_manifest(checkpoint)["step"])


def _with_data(config: RunConfig, **sources: Any) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=sources)})


def _is_writer() -> bool:
    return os.environ.get("RANK", "0") == "0"
