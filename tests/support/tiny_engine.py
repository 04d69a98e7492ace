"""Builds a trainable policy and a vLLM engine on a tiny model.

Engines live as long as the process: closing one, or letting go of it, takes vLLM's process groups
from all others.
"""

from pathlib import Path

from checkpoints_tools.hf import HFReader
from megatron_rl.config import OptimizerConfig, PolicyConfig, RolloutConfig
from megatron_rl.models import model_spec
from megatron_rl.precision import resolve_flow

MAX_MODEL_LEN = 96
_ENGINES: list = []


def build_policy(path: Path, flow: str, lr: float = 1e-2):
    from megatron_rl.policy.parallel import initialize
    from megatron_rl.policy.policy import Policy

    config = PolicyConfig(optimizer=OptimizerConfig(lr=lr))
    layout = initialize(config, seed=0)
    reader = HFReader(path)
    policy = Policy(model_spec(reader.config), resolve_flow(flow), config, layout)
    policy.make_trainable(10, policy.load(reader, list(reader)))
    return policy


def build_engine(path: Path, policy, *, eos_token_ids=None, max_model_len=MAX_MODEL_LEN, **config):
    from megatron_rl.rollout.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        path,
        policy.flow,
        RolloutConfig(kv_cache_gib=0.125, **config),
        plan=policy.plan,
        max_model_len=max_model_len,
        parameter_names=policy.parameters.hf_shapes,
        eos_token_ids=eos_token_ids or policy.spec.eos_token_ids,
    )
    _ENGINES.append(engine)
    return engine
