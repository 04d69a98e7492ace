"""Refuses a run whose rollout is not contained in its training, before anything heavy is loaded."""

import json
from pathlib import Path

from megatron_rl.config import RunConfig
from megatron_rl.config.sft import SFTConfig
from megatron_rl.launch.environment import NVIDIA_DRIVER
from megatron_rl.precision import LinearPlan, flow_of
from megatron_rl.precision.contract import Violation, contract, refusal
from megatron_rl.precision.exactness import PlatformName


def expected_platform() -> PlatformName:
    """The platform that a run on this machine will find, without asking torch."""
    return "cuda" if NVIDIA_DRIVER.exists() else "cpu"


def violations_of(config: RunConfig | SFTConfig, plan: LinearPlan | None = None) -> list[Violation]:
    """The contract of a configuration, on this machine's platform."""
    return contract(
        flow_of(config.precision),
        plan,
        train_tp=config.policy.tensor_model_parallel_size,
        rollout_tp=config.rollout.tensor_parallel_size,
        platform=expected_platform(),
    )


def check_formats(config: RunConfig | SFTConfig) -> None:
    """Checks what needs no model; imports no torch.

    Raises:
        ValueError: The run may not start.
    """
    _refuse(config, violations_of(config))


def check_partition(config: RunConfig | SFTConfig, model_path: Path) -> None:
    """Checks the blocks of the model's linear layers; imports torch, and no engine.

    Raises:
        ValueError: The run may not start.
    """
    plan = quantised_layers(config, model_path)
    if plan is not None:
        _refuse(config, violations_of(config, plan))


def quantised_layers(config: RunConfig | SFTConfig, model_path: Path) -> LinearPlan | None:
    """Which layers of a model the flow quantises; None for a flow that quantises none.

    Raises:
        ValueError: The model is not supported, or none of its layers can be quantised.
    """
    flow = flow_of(config.precision)
    if not (flow.trains_quantised or flow.serves_quantised):
        return None
    from megatron_rl.models import linear_plan, model_spec, parameter_map

    hf_config = json.loads((model_path / "config.json").read_text())
    return linear_plan(parameter_map(model_spec(hf_config)), flow)


def _refuse(config: RunConfig | SFTConfig, violations: list[Violation]) -> None:
    flow = flow_of(config.precision)
    message = refusal(flow, violations, allow_mismatch=config.precision.allow_mismatch)
    if message is not None:
        raise ValueError(message)
