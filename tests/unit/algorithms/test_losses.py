import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.aggregation import aggregate
from megatron_rl.algorithms.losses import (
    MAX_LOG_RATIO,
    PolicyLossInputs,
    cispo,
    clipped_surrogate,
    gspo,
)

B, S = 4, 6
LOSSES = [
    pytest.param(lambda i: clipped_surrogate(i, clip_low=0.2, clip_high=0.28), id="clip"),
    pytest.param(
        lambda i: clipped_surrogate(i, clip_low=0.2, clip_high=0.28, dual_clip=3.0), id="dual"
    ),
    pytest.param(lambda i: gspo(i, clip_low=3e-4, clip_high=4e-4), id="gspo"),
    pytest.param(lambda i: cispo(i, clip_low=1.0, clip_high=0.28), id="cispo"),
]


def make_inputs(seed, noise=0.4, per_token=True):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(B, S, generator=generator) * 4
    new = old + noise * torch.randn(B, S, generator=generator)
    advantages = torch.randn(B, S if per_token else 1, generator=generator)
    advantages[1] = 0.0
    lengths = torch.randint(1, S + 1, (B,), generator=generator)
    mask = torch.arange(S) < lengths[:, None]
    return PolicyLossInputs(
        logprobs=new.requires_grad_(), old_logprobs=old, advantages=advantages, mask=mask
    )


def replace(inputs, **changes):
    fields = ("logprobs", "old_logprobs", "advantages", "mask")
    return PolicyLossInputs(**{f: changes.get(f, getattr(inputs, f)) for f in fields})


def gradient(loss_function, inputs):
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    loss = loss_function(replace(inputs, logprobs=logprobs)).loss
    return torch.autograd.grad(loss.sum(), logprobs)[0]


def literal_token(ratio, advantage, low, high, dual):
    """PPO's objective as the papers print it, for one token: loss and d loss / d log-prob."""
    unclipped = ratio * advantage
    clipped = min(max(ratio, low), high) * advantage
    objective, slope = min(
        (unclipped, unclipped), (clipped, 0.0 if clipped != unclipped else unclipped)
    )
    if dual is not None and advantage < 0 and dual * advantage > objective:
        objective, slope = dual * advantage, 0.0
    return -objective, -slope


@pytest.mark.parametrize("dual", [None, 1.5])
@given(seed=st.integers(0, 2**31), per_token=st.booleans())
@settings(deadline=None, max_examples=30)
def test_clipped_surrogate_agrees_with_literal_loops(dual, seed, per_token):
    inputs = make_inputs(seed, per_token=per_token)

    def loss_function(i):
        return clipped_surrogate(i, clip_low=0.2, clip_high=0.28, dual_clip=dual)

    out, grad = loss_function(inputs), gradient(loss_function, inputs)
    for b in range(B):
        for t in range(S):
            if not inputs.mask[b, t]:
                continue
            advantage = inputs.advantages[b, t if per_token else 0].item()
            ratio = math.exp(inputs.logprobs[b, t].item() - inputs.old_logprobs[b, t].item())
            loss, slope = literal_token(ratio, advantage, 0.8, 1.28, dual)
            assert out.ratio[b, t].item() == pytest.approx(ratio, rel=1e-5)
            assert out.loss[b, t].item() == pytest.approx(loss, rel=1e-5, abs=1e-6)
            assert grad[b, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-6)


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_clip_flags_mark_exactly_the_tokens_without_gradient(seed):
    inputs = make_inputs(seed)

    def loss_function(i):
        return clipped_surrogate(i, clip_low=0.2, clip_high=0.28, dual_clip=1.5)

    out, grad = loss_function(inputs), gradient(loss_function, inputs)
    flagged = out.clipped_low | out.clipped_high | out.clipped_dual
    signal = inputs.mask & (inputs.advantages != 0)
    assert torch.equal(grad != 0, signal & ~flagged)
    assert (inputs.advantages[out.clipped_low] < 0).all()
    assert (inputs.advantages[out.clipped_high] > 0).all()
    assert (out.ratio[out.clipped_low] < 0.8).all()
    assert (out.ratio[out.clipped_high] > 1.28).all()
    assert (out.ratio[out.clipped_dual] > 1.5).all()
    counts = out.clipped_low.int() + out.clipped_high.int() + out.clipped_dual.int()
    assert counts.max() <= 1


def test_the_range_is_asymmetric():
    """Ratio 1.25 lies inside clip-higher's range and outside PPO's; 0.75 is out on both."""
    logprobs = torch.tensor([[1.25, 1.25, 0.75, 0.75]]).log()
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 4),
        advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
        mask=torch.ones(1, 4),
    )
    wide = clipped_surrogate(inputs, clip_low=0.2, clip_high=0.28)
    assert wide.clipped_high.tolist() == [[False] * 4]
    assert wide.clipped_low.tolist() == [[False, False, False, True]]
    narrow = clipped_surrogate(inputs, clip_low=0.2, clip_high=0.2)
    assert narrow.clipped_high.tolist() == [[True, False, False, False]]
    torch.testing.assert_close(narrow.loss, torch.tensor([[-1.2, 1.25, -0.75, 0.8]]))


@pytest.mark.parametrize("loss_function", LOSSES)
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_on_policy_gradient_is_reinforce(loss_function, seed):
    """Through a softmax, so that it is the gradient of the model that is compared, not a factor."""
    inputs = make_inputs(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, S, 11, generator=generator).requires_grad_()
    tokens = torch.randint(0, 11, (B, S, 1), generator=generator)
    logprobs = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1)
    on_policy = replace(inputs, logprobs=logprobs, old_logprobs=logprobs.detach())
    out = loss_function(on_policy)
    assert torch.equal(out.ratio, torch.ones(B, S))
    assert not (out.clipped_low | out.clipped_high | out.clipped_dual).any()
    (actual,) = torch.autograd.grad(out.loss.sum(), logits, retain_graph=True)
    reinforce = -(inputs.advantages * logprobs)[inputs.mask].sum()
    (expected,) = torch.autograd.grad(reinforce, logits)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_gspo_token_form_is_the_sequence_form(seed):
    """Value and gradient of -min(s A, clip(s) A) averaged over sequences, written per sequence."""
    inputs = make_inputs(seed, noise=0.15, per_token=False)
    leaf = inputs.logprobs.detach().clone().requires_grad_()
    out = gspo(replace(inputs, logprobs=leaf), clip_low=0.02, clip_high=0.05)
    loss = aggregate(out.loss, inputs.mask, "seq-mean-token-mean")
    (actual,) = torch.autograd.grad(loss, leaf)

    other = inputs.logprobs.detach().clone().requires_grad_()
    terms = []
    for b in range(B):
        row = inputs.mask[b]
        s = (other[b][row] - inputs.old_logprobs[b][row]).mean().exp()
        advantage = inputs.advantages[b, 0]
        terms.append(-torch.minimum(s * advantage, s.clamp(0.98, 1.05) * advantage))
    expected_loss = torch.stack(terms).mean()
    (expected,) = torch.autograd.grad(expected_loss, other)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_cispo_keeps_every_gradient_and_clips_its_weight(seed):
    inputs = make_inputs(seed)
    out = cispo(inputs, clip_low=0.1, clip_high=0.28)
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().exp()
    weight = ratio.clamp(0.9, 1.28)
    expected = torch.where(inputs.mask, -weight * inputs.advantages, 0.0)
    actual = gradient(lambda i: cispo(i, clip_low=0.1, clip_high=0.28), inputs)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(actual != 0, inputs.mask & (inputs.advantages != 0))
    assert torch.equal(out.clipped_high, inputs.mask & (ratio > 1.28))
    assert torch.equal(out.clipped_low, inputs.mask & (ratio < 0.9))


@pytest.mark.parametrize("loss_function", LOSSES)
@given(seed=st.integers(0, 2**31), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@settings(deadline=None, max_examples=20)
def test_padding_is_never_read(loss_function, seed, garbage):
    inputs = make_inputs(seed)
    dirty = PolicyLossInputs(
        **{
            name: getattr(inputs, name).detach().masked_fill(~inputs.mask, garbage)
            for name in ("logprobs", "old_logprobs", "advantages")
        },
        mask=inputs.mask,
    )
    clean_out, dirty_out = loss_function(inputs), loss_function(dirty)
    for name in clean_out.__slots__:
        clean, other = getattr(clean_out, name), getattr(dirty_out, name)
        assert torch.equal(clean, other), name
        padding = 1.0 if name == "ratio" else 0.0
        assert (other[~inputs.mask].float() == padding).all(), name
    assert torch.equal(gradient(loss_function, dirty), gradient(loss_function, inputs))


@pytest.mark.parametrize("loss_function", LOSSES)
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=15)
def test_rows_are_independent_and_order_does_not_matter(loss_function, seed):
    inputs = make_inputs(seed)
    whole = loss_function(inputs).loss
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    shuffled = PolicyLossInputs(
        logprobs=inputs.logprobs[order],
        old_logprobs=inputs.old_logprobs[order],
        advantages=inputs.advantages[order],
        mask=inputs.mask[order],
    )
    torch.testing.assert_close(loss_function(shuffled).loss, whole[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss_function", LOSSES)
def test_extreme_ratios_stay_finite(loss_function):
    logprobs = torch.tensor([[-1e4, -1.0, 0.0]], requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[0.0, -1.0, -1e4]]),
        advantages=torch.tensor([[-1.0]]),
        mask=torch.ones(1, 3),
    )
    out = loss_function(inputs)
    out.loss.sum().backward()
    for value in (out.loss, out.ratio, out.approx_kl_k1, out.approx_kl_k3, logprobs.grad):
        assert torch.isfinite(value).all()
    assert out.ratio.max() <= math.exp(MAX_LOG_RATIO) * (1 + 1e-6)


@pytest.mark.parametrize("loss_function", LOSSES)
def test_only_the_policy_gets_a_gradient(loss_function):
    inputs = make_inputs(1)
    inputs = replace(
        inputs,
        old_logprobs=inputs.old_logprobs.clone().requires_grad_(),
        advantages=inputs.advantages.clone().requires_grad_(),
    )
    out = loss_function(inputs)
    out.loss.sum().backward()
    assert inputs.old_logprobs.grad is None and inputs.advantages.grad is None
    assert inputs.logprobs.grad is not None
    assert [n for n in out.__slots__ if getattr(out, n).requires_grad] == ["loss"]
    assert out.loss.dtype == out.ratio.dtype == out.approx_kl_k3.dtype == torch.float32


def test_kl_diagnostics_are_from_old_to_new():
    inputs = make_inputs(2)
    out = clipped_surrogate(inputs, clip_low=0.2, clip_high=0.2)
    d = (inputs.logprobs - inputs.old_logprobs).detach()
    torch.testing.assert_close(out.approx_kl_k1, torch.where(inputs.mask, -d, 0.0))
    torch.testing.assert_close(
        out.approx_kl_k3, torch.where(inputs.mask, d.exp() - 1 - d, 0.0), rtol=1e-4, atol=1e-6
    )


def test_no_bounds_is_plain_importance_sampling():
    inputs = make_inputs(4)
    out = clipped_surrogate(inputs, clip_low=1.0, clip_high=math.inf)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    torch.testing.assert_close(
        out.loss, torch.where(inputs.mask, -ratio * inputs.advantages, 0.0), rtol=0, atol=0
    )


def test_errors_name_what_was_wrong():
    inputs = make_inputs(0)
    with pytest.raises(ValueError, match="clip_low is 1.5"):
        clipped_surrogate(inputs, clip_low=1.5, clip_high=0.2)
    with pytest.raises(ValueError, match="clip_high is -0.1"):
        gspo(inputs, clip_low=0.2, clip_high=-0.1)
    with pytest.raises(ValueError, match="clip_high is nan"):
        cispo(inputs, clip_low=0.2, clip_high=math.nan)
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        clipped_surrogate(inputs, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"advantages have shape \[4\].*\[4, 6\] or \[4, 1\]"):
        clipped_surrogate(replace(inputs, advantages=torch.zeros(4)), clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="logprobs is torch.bfloat16"):
        clipped_surrogate(
            replace(inputs, logprobs=inputs.logprobs.bfloat16()), clip_low=0.2, clip_high=0.2
        )
    with pytest.raises(ValueError, match=r"old_logprobs has shape \[4, 5\]"):
        clipped_surrogate(
            replace(inputs, old_logprobs=torch.zeros(4, 5)), clip_low=0.2, clip_high=0.2
        )
