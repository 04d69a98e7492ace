"""Several steps of the policy against plain torch: transformers' model, autograd, torch's AdamW."""

import math

import pytest
import torch

from megatron_rl.config import OptimizerConfig
from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.policy.packing import pack_groups
from support.groups import random_groups, reference_logprobs, shape_of

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def hf_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def weights_of(shape):
    return torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)


def update(policy, groups, objective=None, temperature=0.9):
    shape = shape_of(groups)

    def loss(logprobs, entropy, rows, columns):
        return (weights_of(shape)[rows, columns] * (logprobs + 0.3 * entropy)).sum()

    return policy.update(groups, shape, objective or loss, temperature=temperature)


def cosine(step, config, total):
    """Learning rate of a step, counted from 0."""
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    peak = max(config.lr_warmup_steps - 1, 0)
    done = (step - peak) / (total - peak)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


@pytest.mark.parametrize(
    ("family", "tie", "clip"),
    [("llama", False, 0.5), ("qwen2", False, 0.0), ("qwen3", True, 0.5)],
)
def test_steps_equal_adamw_on_plain_sequences(tiny_policy, tiny_model_dir, family, tie, clip):
    # Adam divides a gradient by its own size; this epsilon keeps the rounding of tiny gradients
    # from deciding the sign of a whole step.
    config = OptimizerConfig(
        lr=2e-3,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_style="cosine",
        weight_decay=0.3,
        clip_grad=clip,
        beta1=0.8,
        beta2=0.9,
        epsilon=1e-3,
    )
    model = {"tie_word_embeddings": tie}
    policy = tiny_policy(family, model=model, optimizer=config, micro_batch_tokens=16)
    reference = hf_model(tiny_model_dir(family, **model))
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    parameters = list(reference.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        eps=1e-3,
    )
    for step in range(4):
        groups = random_groups(seed=step)
        logprobs, entropy = reference_logprobs(reference, groups, 0.9)
        loss = (weights_of(shape_of(groups)) * (logprobs + 0.3 * entropy)).sum()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf).item()
        for group in adamw.param_groups:
            group["lr"] = cosine(step, config, total=10)
        adamw.step()
        result = update(policy, groups)
        assert result.lr == pytest.approx(cosine(step, config, total=10), rel=1e-9)
        assert result.values.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert clip == 0 or norm > clip
    ours = dict(policy.named_tensors())
    for name, parameter in reference.named_parameters():
        moved = (parameter.detach() - start[name]).norm()
        assert moved > 0
        # Of what the steps moved; the gradients of key biases nearly cancel.
        assert (ours[name] - parameter.detach()).norm() <= 5e-5 * moved, name


def test_the_cosine_ends_at_the_smallest_rate(tiny_policy):
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_steps=3, lr_decay_style="cosine")
    policy = tiny_policy(optimizer=config, model={"num_layers": 1})
    groups = random_groups(sizes=((2, (2,)),))
    rates = [update(policy, groups).lr for _ in range(12)]
    expected = [cosine(step, config, total=10) for step in range(11)] + [1e-4]
    assert rates == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_as_long_as_the_run_is_refused(tiny_policy):
    with pytest.raises(ValueError, match="lr_warmup_steps=10 leaves no step .* of 10 in all"):
        tiny_policy(optimizer=OptimizerConfig(lr_warmup_steps=10))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_packed_stream_equal_transformers(tiny_policy, tiny_model_dir, family):
    groups = random_groups()
    policy, reference = tiny_policy(family), hf_model(tiny_model_dir(family))
    packed = pack_groups(groups)
    with torch.no_grad():
        ours = policy.wrapped(
            packed.input_ids, packed.position_ids, packed=packed, return_logits=True
        )
        for group, span in zip(groups, packed.spans, strict=True):
            first = span.start + span.prompt_length
            for response, length in zip(group.responses, span.response_lengths, strict=True):
                ids = torch.tensor([[*group.prompt_ids, *response.token_ids[:-1]]])
                theirs = reference(ids).logits[0]
                prompt = range(span.start, span.start + span.prompt_length)
                places = [*prompt, *range(first, first + length)]
                torch.testing.assert_close(ours[places], theirs, rtol=0, atol=2e-5)
                first += length


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 1, "share_prompt_prefix": False, "logprob_chunk_tokens": 2},
        {"micro_batch_tokens": 11, "logprob_chunk_tokens": 1},
        {"share_prompt_prefix": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_gradient_survives_any_cut(tiny_policy, family, options):
    groups = random_groups(seed=3, sizes=((3, (1, 1)), (8, (7, 2, 2)), (1, (4,)), (5, (1,))))

    def gradients(**how):
        policy = tiny_policy(family, **how)
        policy.optimizer.step = lambda: (True, 1.0, None)  # keep the gradients as they are
        values = update(policy, groups).values
        return values, {n: p.main_grad.clone() for n, p in policy.model.named_parameters()}

    values, expected = gradients()
    other, ours = gradients(**options)
    assert other.loss == pytest.approx(values.loss, rel=1e-5)
    torch.testing.assert_close(other.logprobs, values.logprobs, rtol=0, atol=1e-5)
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def optimizer_state(policy):
    from megatron_rl.policy.optimizer import torch_optimizers

    tensors = [t.clone() for _, t in policy.named_tensors()]
    for inner in torch_optimizers(policy.optimizer):
        for values in inner.state.values():
            tensors += [values[key].clone() for key in sorted(values)]
    return tensors


def test_a_nan_loss_leaves_no_trace(tiny_policy):
    config = OptimizerConfig(lr=1e-2, lr_decay_style="cosine")
    policies = tiny_policy(optimizer=config), tiny_policy(optimizer=config)
    for policy in policies:
        update(policy, random_groups(1))
    before, rate = optimizer_state(policies[0]), policies[0].current_lr
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        update(policies[0], random_groups(2), lambda lp, e, r, c: lp.sum() * math.nan)
    assert all(map(torch.equal, before, optimizer_state(policies[0])))
    assert policies[0].current_lr == rate
    for policy in policies:
        update(policy, random_groups(3))
    assert all(map(torch.equal, *map(optimizer_state, policies)))


def test_a_nan_gradient_under_a_finite_loss_is_an_error(tiny_policy):
    def objective(logprobs, entropy, rows, columns):
        return (logprobs - logprobs.detach()).abs().sqrt().sum()  # 0, with slope 0 * inf

    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        update(tiny_policy(), random_groups(), objective)
