"""The vLLM engine and weight sync on real engines: exactness, completeness, isolation."""

import random

import numpy as np
import pytest
import torch

from checkpoints_tools.hf import HFReader, write_hf_directory
from megatron_rl.precision import LinearPlan
from megatron_rl.rollout import RolloutTimeout, Sampling
from megatron_rl.sync import stream_weights
from support.tiny_engine import build_engine

NO_PLAN = LinearPlan(quantised=(), exempt=())
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18], [40] * 40]


def groups_of(prompts, completions):
    from megatron_rl.policy.packing import PromptGroup, Response

    return [
        PromptGroup(
            prompt_ids=prompts[c.prompt_index],
            responses=(Response(row=row, token_ids=c.token_ids),),
        )
        for row, c in enumerate(completions)
    ]


def policy_logprobs(policy, prompts, completions, temperature):
    shape = (len(completions), max(len(c.token_ids) for c in completions))
    values = policy.score(groups_of(prompts, completions), shape, temperature=temperature)
    rollout = torch.zeros(shape)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, c in enumerate(completions):
        rollout[row, : len(c.logprobs)] = torch.tensor(c.logprobs)
        mask[row, : len(c.logprobs)] = True
    return values.logprobs[mask], rollout[mask]


def train_a_bit(policy):
    """One large optimizer step in an arbitrary direction, so that every parameter moves."""
    from megatron_rl.policy.packing import PromptGroup, Response

    group = PromptGroup(
        prompt_ids=PROMPTS[0],
        responses=tuple(Response(row=i, token_ids=[20 + i, 30, 31]) for i in range(4)),
    )
    policy.update(
        [group], (4, 3), lambda lp, entropy, rows, cols: -(lp * (rows + 1)).mean(), temperature=1.0
    )


def sync(policy, engine, version=0):
    engine.update_weights(stream_weights(policy, policy.flow), version)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fp32_logprobs_of_rollout_and_policy_agree(policy_and_engine, family, temperature):
    policy, engine = policy_and_engine(family, "fp32")
    sync(policy, engine)
    completions = engine.generate(
        PROMPTS, Sampling(n=4, temperature=temperature, max_tokens=16, seed=3)
    )
    ours, theirs = policy_logprobs(policy, PROMPTS, completions, temperature)
    assert len(ours) > 50
    assert (ours - theirs).abs().mean() < 1e-5


@pytest.mark.parametrize(
    ("family", "flow", "tie"), [("llama", "bf16", True), ("qwen3", "fp32", False)]
)
def test_two_syncs_equal_a_fresh_engine(
    policy_and_engine, tiny_model_dir, tmp_path, family, flow, tie
):
    """Stale tied heads, stale fused layers or stale caches would show in the second sync."""
    path = tiny_model_dir(family, tie_word_embeddings=tie)
    policy, engine = policy_and_engine(family, flow, tie_word_embeddings=tie)
    greedy = Sampling(temperature=0.0, max_tokens=24)
    before = engine.generate(PROMPTS, greedy)
    for version in (1, 2):
        train_a_bit(policy)
        sync(policy, engine, version)
        assert engine.version == version
    after = engine.generate(PROMPTS, greedy)
    exported = tmp_path / "hf"
    config = HFReader(path).config
    write_hf_directory(exported, hf_config=config, tensors=policy.named_tensors(), assets_from=path)
    expected = build_engine(exported, policy).generate(PROMPTS, greedy)
    assert [c.token_ids for c in after] == [c.token_ids for c in expected]
    assert [c.logprobs for c in after] == [c.logprobs for c in expected]
    assert [c.logprobs for c in after] != [c.logprobs for c in before]

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for name, tensor in policy.named_tensors():
        assert torch.equal(model.state_dict()[name], tensor.float()), name


def test_a_call_repeats_whatever_the_batch(policy_and_engine):
    _, engine = policy_and_engine("llama", "bf16")
    sampling = Sampling(n=3, max_tokens=12, seed=7)
    first = engine.generate(PROMPTS, sampling)
    assert engine.generate(PROMPTS, sampling) == first
    # The first prompt's samples do not depend on what else is in the batch.
    alone = engine.generate(PROMPTS[:1], sampling)
    assert [c.token_ids for c in alone] == [c.token_ids for c in first[:3]]
    other = engine.generate(PROMPTS, Sampling(n=3, max_tokens=12, seed=8))
    assert [c.token_ids for c in other] != [c.token_ids for c in first]
    assert len({c.token_ids for c in first[:3]}) > 1
    order = [(c.prompt_index, c.sample_index) for c in first]
    assert order == [(p, s) for p in range(len(PROMPTS)) for s in range(3)]


def test_host_random_state_is_untouched(policy_and_engine):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    _, engine = policy_and_engine("mistral", "bf16")  # built here: vLLM reseeds when it starts
    engine.generate(PROMPTS, Sampling(n=2, max_tokens=4))
    assert random.getstate() == expected[0]
    assert np.random.get_state()[1].tolist() == expected[1]
    assert torch.equal(torch.get_rng_state(), expected[2])


def test_stop_tokens_end_a_response_and_cuts_are_flagged(policy_and_engine):
    _, engine = policy_and_engine("llama", "bf16")
    free = engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert all(c.truncated and len(c.token_ids) == 8 for c in free)
    stop = free[0].token_ids[3]
    stopped = engine.generate(
        PROMPTS[:1], Sampling(temperature=0.0, max_tokens=8, stop_token_ids=(stop,))
    )[0]
    end = free[0].token_ids.index(stop) + 1
    assert stopped.token_ids == free[0].token_ids[:end]
    assert not stopped.truncated and len(stopped.logprobs) == end


def test_every_eos_token_of_the_model_stops(policy_and_engine, tiny_model_dir):
    policy, engine = policy_and_engine("llama", "bf16")
    greedy = Sampling(temperature=0.0, max_tokens=8)
    free = engine.generate(PROMPTS[:1], Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    eos = (policy.spec.eos_token_ids[0], free.token_ids[2])
    second = build_engine(tiny_model_dir("llama"), policy, eos_token_ids=eos)
    sync(policy, engine)
    sync(policy, second)
    assert second.generate(PROMPTS[:1], greedy)[0].token_ids[-1] in eos


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: [x for x in s if "k_proj" not in x[0]], "missing.*k_proj"),
        (lambda s: [*s, ("model.extra.weight", torch.zeros(1))], "model.extra.weight"),
        (lambda s: [*s, s[0]], "twice"),
        (lambda s: [(n, t * float("nan")) if "norm" in n else (n, t) for n, t in s], "NaN or Inf"),
    ],
    ids=["incomplete", "unknown", "repeated", "not-finite"],
)
def test_a_bad_sync_raises_and_never_serves(policy_and_engine, damage, message):
    policy, engine = policy_and_engine("qwen3", "fp32")
    sync(policy, engine, 5)
    expected = engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=6))
    stream = list(stream_weights(policy, policy.flow))
    with pytest.raises(ValueError, match=message):
        engine.update_weights(damage(stream), 6)
    assert engine.version == 5
    with pytest.raises(RuntimeError, match="no complete policy"):
        engine.generate(PROMPTS, Sampling(max_tokens=2))
    sync(policy, engine, 7)
    assert engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=6)) == expected


def test_prompts_that_leave_no_room_are_refused(policy_and_engine):
    _, engine = policy_and_engine("llama", "bf16")
    with pytest.raises(ValueError, match="prompt 1 has 90 tokens"):
        engine.generate([[1], [1] * 90], Sampling(max_tokens=16))
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        engine.generate([[]], Sampling(max_tokens=16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_token": 3}, "did you mean 'max_num_batched_tokens'"),
        ({"dtype": "float16"}, "follows from the precision flow"),
    ],
)
def test_engine_options_are_checked(tmp_path, options, message):
    from megatron_rl.config import RolloutConfig
    from megatron_rl.precision import resolve_flow
    from megatron_rl.rollout.vllm_engine import engine_arguments

    with pytest.raises(ValueError, match=message):
        engine_arguments(tmp_path, resolve_flow("bf16"), NO_PLAN, RolloutConfig(vllm=options), 64)


def test_a_stream_of_another_flow_is_refused(policy_and_engine):
    from megatron_rl.precision import resolve_flow

    policy, _ = policy_and_engine("llama", "bf16")
    with pytest.raises(ValueError, match="one flow"):
        list(stream_weights(policy, resolve_flow("fp32")))


def test_sampling_ends_at_its_time_limit_and_the_engine_goes_on(policy_and_engine, monkeypatch):
    _, engine = policy_and_engine("llama", "bf16")
    sampling = Sampling(n=3, max_tokens=40, seed=7, ignore_eos=True)
    expected = engine.generate(PROMPTS, sampling)
    stepper = engine._llm.llm_engine
    step, clock = stepper.step, [0.0]

    def slow_step():
        clock[0] += 1.0
        return step()

    # Each engine step takes a second: 40 tokens do not fit into 20, and 8 do.
    monkeypatch.setattr("megatron_rl.rollout.time_limit.monotonic", lambda: clock[0])
    monkeypatch.setattr(stepper, "step", slow_step)
    monkeypatch.setattr(engine, "_timeout_s", 20.0)
    with pytest.raises(RolloutTimeout, match="within 20 s: 0 of 12 responses were finished"):
        engine.generate(PROMPTS, sampling)
    assert clock[0] == pytest.approx(21)
    assert len(engine.generate(PROMPTS, Sampling(max_tokens=8))) == 4
    monkeypatch.undo()
    assert engine.generate(PROMPTS, sampling) == expected
