"""Everything a run is made of, built from its configuration.

The order matters: data and rewards first (bad input ends a run in seconds, before a model is
built), then the policy, then the engine. Nothing is trained here.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from checkpoints_tools.hf import HFReader
from megatron_rl.config import RunConfig
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.data.types import TokenizedPrompt
from megatron_rl.models import ModelSpec, eos_token_ids, model_spec
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.policy import FrozenPolicy, Policy
from megatron_rl.precision import PrecisionFlow, resolve_flow
from megatron_rl.rewards.manager import RewardManager
from megatron_rl.rollout import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads: checked before any model exists."""

    model_path: Path
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    flow: PrecisionFlow
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    train_prompts: list[TokenizedPrompt]
    val_prompts: list[TokenizedPrompt]
    rewards: RewardManager


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts of a run."""

    config: RunConfig
    inputs: Inputs
    loader: PromptLoader
    policy: Policy
    reference: FrozenPolicy | None
    engine: Engine


def load_inputs(config: RunConfig, model_path: Path) -> Inputs:
    """Loads and checks everything that a run reads.

    Raises:
        ValueError: The model, a data source, or the reward function is not usable.
    """
    reader = HFReader(model_path)
    spec = model_spec(reader.config)
    eos = eos_token_ids(reader.config, reader.generation_config)
    if not eos:
        raise ValueError(f"{model_path} names no EOS token; add eos_token_id to its config.json")
    longest = config.max_sequence_length_tokens
    if longest > spec.max_position_embeddings:
        raise ValueError(
            f"data.max_prompt_length_tokens + rollout.max_response_length_tokens = {longest} "
            f"exceeds the model's {spec.max_position_embeddings} positions; lower one of them"
        )
    tokenizer = load_tokenizer(model_path)
    train, val = load_prompts(config.data, tokenizer)
    return Inputs(
        model_path=model_path,
        spec=spec,
        eos_token_ids=tuple(eos),
        flow=resolve_flow(config.precision.flow),
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.stop_token_ids(config.rollout.stop),
        train_prompts=train,
        val_prompts=val,
        rewards=RewardManager(config.reward),
    )


def build_components(config: RunConfig, inputs: Inputs, layout: ParallelLayout) -> Components:
    """Builds policy, reference, engine and loader.

    Raises:
        ValueError: Something does not fit: the checkpoint, the parallel sizes, an engine option.
    """
    loader = PromptLoader(
        inputs.train_prompts, config.data.train_batch_size, config.seed, config.data.shuffle
    )
    reader = HFReader(inputs.model_path)
    policy = Policy(inputs.spec, inputs.flow, config.policy, layout)
    unrounded = policy.load(reader, list(reader))
    policy.make_trainable(
        config.trainer.total_steps * config.optimizer_steps_per_rollout, unrounded
    )
    reference = None
    if config.algorithm.kl.coefficient:
        reference = FrozenPolicy(inputs.spec, inputs.flow, config.policy, layout)
        reference.load(reader, list(reader))
    return Components(
        config=config,
        inputs=inputs,
        loader=loader,
        policy=policy,
        reference=reference,
        engine=build_engine(config, inputs, policy),
    )


def build_engine(config: RunConfig, inputs: Inputs, policy: FrozenPolicy) -> Engine:
    """The colocated vLLM engine."""
    from megatron_rl.rollout.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        inputs.model_path,
        inputs.flow,
        config.rollout,
        max_model_len=config.max_sequence_length_tokens,
        parameter_names=policy.parameters.hf_shapes,
        eos_token_ids=inputs.eos_token_ids,
    )
    if policy.layout.world_size == 1:
        return engine
    from megatron_rl.rollout.distributed import DistributedEngine

    return DistributedEngine(engine, config.rollout.tensor_parallel_size)
