"""An update does not depend on how it is cut, and equals plain torch on plain sequences."""

import math

import pytest
import torch

from megatron_rl.config import OptimizerConfig
from megatron_rl.policy.errors import NonFiniteError
from support.groups import random_groups, reference_logprobs, shape_of


def objective_for(shape):
    weights = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)

    def objective(logprobs, entropy, rows, columns):
        return (weights[rows, columns] * (logprobs + 0.3 * entropy)).sum()

    return objective, weights


def gradients(policy):
    return {n: p.main_grad.clone() for n, p in policy.model.named_parameters()}


def run(policy, groups):
    shape = shape_of(groups)
    policy.optimizer.step = lambda: (True, 1.0, None)  # keep the gradients as they are
    result = policy.update(groups, shape, objective_for(shape)[0], temperature=0.8)
    return result.values, gradients(policy)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gradients_equal_autograd_on_plain_sequences(tiny_policy, tiny_model_dir, family):
    from transformers import AutoModelForCausalLM

    from megatron_rl.policy.weights import named_parameters

    groups = random_groups()
    policy = tiny_policy(family)
    _, ours = run(policy, groups)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), dtype=torch.float32, attn_implementation="eager"
    )
    logprobs, entropy = reference_logprobs(model, groups, 0.8)
    weights = objective_for(shape_of(groups))[1]
    (weights * (logprobs + 0.3 * entropy)).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    for name, _ in named_parameters(policy.model):
        expected = policy.parameters.entry(name).to_megatron(theirs)
        scale = expected.abs().max().item()
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=2e-5 * max(scale, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 16},
        {"share_prompt_prefix": False},
        {"share_prompt_prefix": False, "micro_batch_tokens": 20},
        {"logprob_chunk_tokens": 3},
    ],
    ids=str,
)
def test_the_cut_changes_nothing(tiny_policy, options):
    groups = random_groups(sizes=((5, (3, 1, 6)), (9, (4,)), (2, (2, 2)), (7, (5, 5, 5))))
    values, expected = run(tiny_policy("qwen3"), groups)
    other, ours = run(tiny_policy("qwen3", **options), groups)
    assert math.isclose(values.loss, other.loss, rel_tol=1e-5)
    torch.testing.assert_close(values.logprobs, other.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(values.entropy, other.entropy, rtol=0, atol=1e-5)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1))


@pytest.mark.parametrize("share", [True, False], ids=["shared-prompts", "plain-sequences"])
def test_packed_sequences_are_independent(tiny_policy, share):
    """Many in one stream give the log-probs and gradients of one a micro-batch."""
    groups = random_groups(3, sizes=((5, (3, 1, 6)), (9, (4,)), (2, (2, 2)), (1, (1,)), (7, (8,))))
    packed, expected = run(tiny_policy("qwen3", share_prompt_prefix=share), groups)
    alone, ours = run(tiny_policy("qwen3", share_prompt_prefix=share, micro_batch_tokens=1), groups)
    for key in ("logprobs", "entropy"):
        difference = getattr(alone, key) - getattr(packed, key)
        assert difference.norm() <= 1e-5 * getattr(packed, key).norm()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0, name


def test_long_groups_take_the_per_response_path(tiny_policy, monkeypatch):
    from megatron_rl.policy import attention

    groups = random_groups(sizes=((40, (30, 1, 25)), (12, (9, 9))))
    values, expected = run(tiny_policy(), groups)
    monkeypatch.setattr(attention, "DENSE_LIMIT_TOKENS", 1)
    other, ours = run(tiny_policy(), groups)
    torch.testing.assert_close(values.logprobs, other.logprobs, rtol=0, atol=1e-5)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1))


def test_one_step_is_adamw_on_the_clipped_gradient(tiny_policy):
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5)
    groups = random_groups()
    shape = shape_of(groups)
    probe = tiny_policy()
    _, grads = run(probe, groups)
    policy = tiny_policy(optimizer=config)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    result = policy.update(groups, shape, objective_for(shape)[0], temperature=0.8)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5) and norm > 0.5
    for name, parameter in policy.model.named_parameters():
        gradient = grads[name] * (0.5 / (norm + 1e-6))
        decay = 0.1 if parameter.dim() > 1 else 0.0
        # First step of AdamW: the bias-corrected moments are the gradient and its square.
        step = gradient / (gradient.abs() + config.epsilon)
        expected = before[name] * (1 - 1e-3 * decay) - 1e-3 * step
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=2e-6)


def test_the_schedule_moves_once_a_step(tiny_policy):
    config = OptimizerConfig(lr=1e-3, lr_warmup_steps=2, lr_decay_style="linear", min_lr=1e-4)
    policy = tiny_policy(optimizer=config)
    groups = random_groups()
    shape = shape_of(groups)
    rates = [
        policy.update(groups, shape, objective_for(shape)[0], temperature=1.0).lr for _ in range(5)
    ]
    # Of ten steps the warm-up takes two, and the decay reaches its end after the last.
    assert rates == pytest.approx([5e-4, 1e-3, *(1e-3 - k * 9e-4 / 9 for k in (1, 2, 3))])


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_every_step_of_the_warm_up_moves(tiny_policy, warmup):
    policy = tiny_policy(optimizer=OptimizerConfig(lr=1e-3, lr_warmup_steps=warmup))
    rates = []
    for _ in range(6):
        rates.append(policy.current_lr)
        policy.scheduler.step(increment=1)
    expected = [min(1.0, k / warmup) if warmup else 1.0 for k in range(1, 7)]
    assert rates == pytest.approx([1e-3 * share for share in expected])


def test_a_non_finite_loss_leaves_the_weights_alone(tiny_policy):
    policy = tiny_policy()
    before = {n: t.clone() for n, t in policy.named_tensors()}
    groups = random_groups()
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        policy.update(
            groups,
            shape_of(groups),
            lambda lp, e, r, c: lp.sum() * float("nan"),
            temperature=1.0,
        )
    assert all(torch.equal(t, before[n]) for n, t in policy.named_tensors())


def test_bad_megatron_options_are_refused(tiny_policy):
    with pytest.raises(ValueError, match="did you mean 'num_layers'"):
        tiny_policy(megatron={"num_layer": 3})
    with pytest.raises(ValueError, match="virtual_pipeline.* is not offered"):
        tiny_policy(megatron={"virtual_pipeline_model_parallel_size": 2})
    with pytest.raises(ValueError, match="follows from the model"):
        tiny_policy(megatron={"bf16": True})
    selective = {"recompute_granularity": "selective"}
    with pytest.raises(ValueError, match="names 'moe', which the model does not have"):
        tiny_policy(megatron={**selective, "recompute_modules": ["mlp", "moe"]})
    with pytest.raises(ValueError, match="'layernorm', .* Transformer Engine"):
        tiny_policy(megatron={**selective, "recompute_modules": ["layernorm"]})
    policy = tiny_policy(
        megatron={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    )
    assert policy.megatron_config.recompute_granularity == "full"


@pytest.mark.parametrize(
    "recompute",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
    ids=["full", "core_attn", "mlp", "core_attn-mlp"],
)
def test_recompute_changes_nothing(tiny_policy, recompute):
    groups = random_groups()
    _, expected = run(tiny_policy("qwen3"), groups)
    _, ours = run(tiny_policy("qwen3", megatron=recompute), groups)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)
