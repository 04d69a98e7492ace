"""The trainer reproduces the log-prob of every sampled token bit for bit, through updates."""

import pytest
import torch

from megatron_rl.precision import audit
from megatron_rl.rollout import Sampling
from megatron_rl.sync import stream_weights

WHOLE_BLOCKS = {"hidden_size": 256, "head_dim": 128, "ffn_hidden_size": 384}
PROMPT_LENGTHS = (1, 3, 31, 32, 33, 60, 5)
SAMPLES = 3


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def groups_of(prompt_ids, completions):
    from megatron_rl.policy.packing import PromptGroup, Response

    return [
        PromptGroup(
            prompt_ids=prompt,
            responses=tuple(
                Response(row=row, token_ids=c.token_ids)
                for row, c in enumerate(completions)
                if c.prompt_index == index
            ),
        )
        for index, prompt in enumerate(prompt_ids)
    ]


def differences(policy, engine, step, temperature):
    """Sampled minus recomputed log-probs of a fresh rollout, ``[N]``."""
    prompt_ids = prompts(step)
    completions = engine.generate(
        prompt_ids, Sampling(n=SAMPLES, temperature=temperature, max_tokens=24, seed=step)
    )
    shape = len(completions), max(len(c.token_ids) for c in completions)
    groups = groups_of(prompt_ids, completions)
    scored = policy.score(groups, shape, temperature=temperature).logprobs
    return torch.cat(
        [
            scored[row, : len(c.token_ids)] - torch.tensor(c.logprobs)
            for row, c in enumerate(completions)
        ]
    ), groups


def train_one_step(policy, groups):
    """A step that moves every weight visibly."""
    rows = sum(len(g.responses) for g in groups)
    columns = max(len(r.token_ids) for g in groups for r in g.responses)

    def objective(logprobs, entropy, rows, columns):
        return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() / len(logprobs)

    policy.update(groups, (rows, columns), objective, temperature=1.0)


@pytest.mark.parametrize(
    "family, model, flow",
    [
        ("llama", {"tie_word_embeddings": True}, "bf16"),
        ("qwen2", {}, "bf16"),
        ("qwen3", {"head_dim": 64}, "bf16"),
        ("mistral", {"num_query_groups": 1}, "bf16"),
        ("llama", WHOLE_BLOCKS | {"tie_word_embeddings": True}, "fp8"),
        ("qwen2", WHOLE_BLOCKS | {"hidden_size": 512}, "fp8"),
        ("qwen3", WHOLE_BLOCKS, "fp8"),
        ("qwen3", {"hidden_size": 256, "head_dim": 64, "ffn_hidden_size": 256}, "fp8"),
    ],
)
def test_sampled_logprobs_are_reproduced_bit_for_bit(family, model, flow, tiny_model_dir):
    from support.tiny_engine import build_engine, build_policy

    path = tiny_model_dir(family, **model)
    policy = build_policy(path, flow, lr=1e-3)
    engine = build_engine(path, policy)
    engine.update_weights(stream_weights(policy, policy.flow), 0)
    for step, temperature in ((0, 1.0), (1, 0.7)):
        found, groups = differences(policy, engine, step, temperature)
        assert found.numel() > 300
        assert found.count_nonzero() == 0, f"step {step}: largest {found.abs().max().item()}"
        assert audit(policy, engine) == []
        train_one_step(policy, groups)
        engine.update_weights(stream_weights(policy, policy.flow), step + 1)


@pytest.fixture
def cached_tokens(monkeypatch):
    """Prompt tokens that vLLM took from its prefix cache, one entry a request, as they finish."""
    from megatron_rl.rollout import vllm_engine

    found = []
    run_requests = vllm_engine.run_requests

    def recorded(*args):
        outputs = run_requests(*args)
        found.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(vllm_engine, "run_requests", recorded)
    return found


@pytest.fixture
def thread_count():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("flow, model", [("bf16", {}), ("fp8", WHOLE_BLOCKS)])
def test_prefix_cache_and_threads_change_no_bit(
    flow, model, tiny_model_dir, cached_tokens, thread_count
):
    """All prompts share a prefix of hundreds of tokens; each has a tail of its own."""
    from support.tiny_engine import build_engine, build_policy

    path = tiny_model_dir("qwen3", max_position_embeddings=512, **model)
    policy = build_policy(path, flow)
    generator = torch.Generator().manual_seed(4)
    shared = torch.randint(3, 250, (300,), generator=generator).tolist()
    prompt_ids = [shared + [5 + tail] * tail for tail in range(1, 5)]
    sampling = Sampling(n=2, temperature=1.0, max_tokens=16, seed=3)
    runs = []
    for is_cached in (True, False):
        options = {"enable_prefix_caching": is_cached}
        engine = build_engine(path, policy, max_model_len=512, vllm=options)
        engine.update_weights(stream_weights(policy, policy.flow), 0)
        for threads in (1, 2):
            thread_count(threads)
            cached_tokens.clear()
            runs.append(engine.generate(prompt_ids, sampling))
            assert (max(cached_tokens) >= 256) == is_cached
    assert all(run == runs[0] for run in runs)
    sampled = torch.cat([torch.tensor(c.logprobs) for c in runs[0]])
    for threads in (1, 2):
        thread_count(threads)
        scored = policy.score(groups_of(prompt_ids, runs[0]), (len(runs[0]), 16), temperature=1.0)
        rows = [scored.logprobs[row, : len(c.token_ids)] for row, c in enumerate(runs[0])]
        assert torch.equal(torch.cat(rows), sampled)


def test_an_fp32_output_layer_is_computed_on_both_sides(tiny_model_dir):
    """Not bit for bit: FP32 products depend on the number of rows."""
    from support.tiny_engine import build_engine, build_policy

    path = tiny_model_dir("llama")
    policy = build_policy(path, {"base": "bf16", "lm_head": "fp32"}, lr=1e-3)
    engine = build_engine(path, policy)
    engine.update_weights(stream_weights(policy, policy.flow), 0)
    found, groups = differences(policy, engine, 0, 1.0)
    assert found.abs().max() < 1e-5
    assert audit(policy, engine) == []
    plain = build_policy(path, "bf16", lr=1e-3)
    shape = (sum(len(g.responses) for g in groups), 24)
    ours, theirs = (p.score(groups, shape, temperature=1.0).logprobs for p in (policy, plain))
    assert 1e-4 < (ours - theirs).abs().max() < 0.1
    train_one_step(policy, groups)
