"""Everything a run is made of, built from its configuration.

The order matters: data and rewards first (bad input ends a run in seconds, before a model is
built), then the policy, then the engine. Nothing is trained here.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from checkpoints_tools.hf import HFReader
from megatron_rl.config import PolicyConfig, RunConfig
from megatron_rl.config.sft import SFTConfig
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.data.types import TokenizedPrompt
from megatron_rl.models import (
    ModelSpec,
    eos_token_ids,
    linear_plan,
    model_spec,
    parameter_map,
)
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.policy import FrozenPolicy, Policy
from megatron_rl.precision import PrecisionFlow, flow_of
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
    loader: PromptLoader[TokenizedPrompt]
    policy: Policy
    reference: FrozenPolicy | None
    engine: Engine


class RunParts(Protocol):
    """What every kind of run has: enough to evaluate, record, save and export."""

    @property
    def config(self) -> RunConfig | SFTConfig:
        """The run."""

    @property
    def inputs(self) -> Inputs:
        """What the run reads."""

    @property
    def loader(self) -> PromptLoader[Any]:
        """Training data, with its position."""

    @property
    def policy(self) -> Policy:
        """The trained policy."""

    @property
    def engine(self) -> Engine | None:
        """What samples and evaluates, if anything does."""


def load_inputs(config: RunConfig, model_path: Path) -> Inputs:
    """Loads and checks everything that a run reads.

    Raises:
        ValueError: The model, a data source, or the reward function is not usable.
    """
    spec, eos = read_model(model_path)
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
        eos_token_ids=eos,
        flow=flow_of(config.precision),
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.stop_token_ids(config.rollout.stop),
        train_prompts=train,
        val_prompts=val,
        rewards=RewardManager(config.reward),
    )


def read_model(model_path: Path) -> tuple[ModelSpec, tuple[int, ...]]:
    """The model's description and its EOS tokens.

    Raises:
        ValueError: The model cannot be trained or names no EOS token.
    """
    reader = HFReader(model_path)
    eos = eos_token_ids(reader.config, reader.generation_config)
    if not eos:
        raise ValueError(f"{model_path} names no EOS token; add eos_token_id to its config.json")
    spec = model_spec(reader.config)
    if spec.moe is not None:
        raise ValueError(
            f"{model_path} is a {spec.architecture}, and training models with experts is not "
            "implemented (checkpoints-tools converts them); use a dense model"
        )
    return spec, tuple(eos)


def build_components(config: RunConfig, inputs: Inputs, layout: ParallelLayout) -> Components:
    """Builds policy, reference, engine and loader.

    Raises:
        ValueError: Something does not fit: the checkpoint, the parallel sizes, an engine option.
    """
    loader = PromptLoader(
        inputs.train_prompts, config.data.train_batch_size, config.seed, config.data.shuffle
    )
    policy = build_policy(
        config.policy,
        inputs,
        layout,
        config.trainer.total_steps * config.optimizer_steps_per_rollout,
    )
    reference = None
    if config.algorithm.kl.coefficient:
        reader = HFReader(inputs.model_path)
        reference = FrozenPolicy(inputs.spec, inputs.flow, config.policy, layout)
        reference.load(reader, list(reader))
    return Components(
        config=config,
        inputs=inputs,
        loader=loader,
        policy=policy,
        reference=reference,
        engine=build_engine(config, inputs, layout),
    )


def build_policy(
    config: PolicyConfig, inputs: Inputs, layout: ParallelLayout, total_optimizer_steps: int
) -> Policy:
    """The trainable policy, with the weights of the model."""
    reader = HFReader(inputs.model_path)
    policy = Policy(inputs.spec, inputs.flow, config, layout)
    unrounded = policy.load(reader, list(reader))
    policy.make_trainable(total_optimizer_steps, unrounded)
    return policy


def build_engine(config: RunConfig | SFTConfig, inputs: Inputs, layout: ParallelLayout) -> Engine:
    """The colocated vLLM engine of this rank, and those of all ranks as one."""
    from megatron_rl.rollout.vllm_engine import VLLMEngine

    parameters = parameter_map(inputs.spec)
    engine = VLLMEngine(
        inputs.model_path,
        inputs.flow,
        config.rollout,
        max_model_len=config.max_sequence_length_tokens,
        plan=linear_plan(parameters, inputs.flow),
        parameter_names=parameters.hf_shapes,
        eos_token_ids=inputs.eos_token_ids,
    )
    if layout.world_size == 1:
        return engine
    from megatron_rl.rollout.distributed import DistributedEngine

    return DistributedEngine(engine, config.rollout.tensor_parallel_size)
