"""Directories that `checkpoints-tools` wrote load in vLLM, and give the flow's own logits."""

from dataclasses import asdict

import pytest
import torch

from checkpoints_tools import cli
from megatron_rl.config import RolloutConfig
from megatron_rl.precision import resolve_flow
from megatron_rl.rollout import Sampling
from megatron_rl.sync import stream_weights

SIZES = {"hidden_size": 256, "num_query_groups": 2, "head_dim": 128, "ffn_hidden_size": 384}
PROMPTS = [[5, 17, 99, 4], list(range(40, 75)), [7]]
ENGINES = []  # closing one would take the process groups of the others


def open_in_vllm(path, flow, plan):
    """vLLM on a directory as it is: what quantises it is its own config.json."""
    from vllm import LLM

    from megatron_rl.rollout.vllm_engine import engine_arguments

    arguments = engine_arguments(path, flow, plan, RolloutConfig(kv_cache_gib=0.125), 96)
    for decided_by_the_directory in ("load_format", "hf_overrides"):
        arguments.pop(decided_by_the_directory, None)
    llm = LLM(**arguments)
    llm.collective_rpc("rl_share_operators")
    ENGINES.append(llm)
    return llm


def greedy(llm):
    """Tokens and log-probs of greedy responses."""
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS], sampling, use_tqdm=False
    )
    found = []
    for output in outputs:
        (sequence,) = output.outputs
        tokens = list(sequence.token_ids)
        found.append(
            (tokens, [p[t].logprob for p, t in zip(sequence.logprobs, tokens, strict=True)])
        )
    return found


@pytest.mark.parametrize(
    ("family", "tie"),
    [
        ("llama", True),
        ("qwen2", False),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("mistral", False, marks=pytest.mark.slow),
    ],
)
def test_vllm_fp8_serves_what_weight_sync_serves(tmp_path, tiny_model_dir, family, tie):
    from support.tiny_engine import build_engine, build_policy

    sizes = SIZES | ({"num_attention_heads": 2} if family == "qwen2" else {})
    path = tiny_model_dir(family, tie_word_embeddings=tie, dtype=torch.bfloat16, **sizes)
    policy = build_policy(path, "fp8")
    engine = build_engine(path, policy)
    engine.update_weights(stream_weights(policy, policy.flow), 0)
    assert cli.main(["import", str(path), str(tmp_path / "megatron"), "--quiet"]) == 0
    export = ["export", str(tmp_path / "megatron"), str(tmp_path / "fp8")]
    assert cli.main([*export, "--format", "vllm-fp8", "--quiet"]) == 0
    llm = open_in_vllm(tmp_path / "fp8", policy.flow, policy.plan)
    served, loaded = engine.report(), llm.collective_rpc("rl_report")[0]
    assert asdict(served) == asdict(loaded)
    sampling = Sampling(n=1, temperature=0.0, max_tokens=12, seed=0, ignore_eos=True)
    expected = [(list(c.token_ids), list(c.logprobs)) for c in engine.generate(PROMPTS, sampling)]
    assert greedy(llm) == expected


def test_an_exported_bf16_directory_serves_what_its_source_does(tmp_path, tiny_model_dir):
    from checkpoints_tools.hf import HFReader
    from megatron_rl.models import linear_plan, parameter_map

    path = tiny_model_dir("qwen3", tie_word_embeddings=True, dtype=torch.bfloat16, **SIZES)
    assert cli.main(["import", str(path), str(tmp_path / "megatron"), "--quiet"]) == 0
    export = ["export", str(tmp_path / "megatron"), str(tmp_path / "hf"), "--quiet"]
    assert cli.main([*export, "--max-shard-size", "300KB"]) == 0
    flow = resolve_flow("bf16")
    plan = linear_plan(parameter_map(HFReader(path).config), flow)
    first, second = (greedy(open_in_vllm(p, flow, plan)) for p in (path, tmp_path / "hf"))
    assert first == second
    assert all(len(set(tokens)) > 3 for tokens, _ in first)
