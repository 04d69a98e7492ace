import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.kl import MAX_LOG_RATIO, k1, k2, k3

logprob = st.floats(-60, 0, width=32, allow_subnormal=False)


@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
@settings(deadline=None)
def test_values_agree_with_the_definitions(pairs):
    policy, reference = torch.tensor(pairs, dtype=torch.float32).T.contiguous()
    for i, (p, r) in enumerate(zip(policy.tolist(), reference.tolist(), strict=True)):
        d = min(r - p, MAX_LOG_RATIO)
        assert k1(policy, reference)[i].item() == pytest.approx(p - r, rel=1e-6)
        assert k2(policy, reference)[i].item() == pytest.approx((r - p) ** 2 / 2, rel=1e-6)
        assert k3(policy, reference)[i].item() == pytest.approx(math.expm1(d) - d, rel=1e-6)
        assert k3(policy, reference)[i].item() >= 0


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_equal_inputs_give_exactly_zero(estimator):
    logprobs = -torch.rand(5, 7) * 12
    value = estimator(logprobs, logprobs.clone())
    assert value.dtype == torch.float32 and value.shape == (5, 7)
    assert (value == 0).all()


def test_k3_keeps_its_digits_near_agreement():
    """Odd steps of the last place of 0.1: d^2 / 2 is on no coarser grid, so rounding shows.

    With steps that are powers of two, or near 1, k3 in float32 or as exp(d) - 1 - d is exact by
    luck.
    """
    steps = torch.tensor([5, 11, 101, 1001], dtype=torch.int32)
    policy = torch.full((4,), -0.1)
    reference = (policy.view(torch.int32) - steps).view(torch.float32)
    d = reference.double() - policy.double()
    assert (d > 3e-8).all() and (d < 1e-5).all()
    exact = d**2 / 2 + d**3 / 6
    torch.testing.assert_close(k3(policy, reference).double(), exact, rtol=1e-6, atol=0)


def expected_gradient(logits, reference, per_token):
    """Exact expectation over the policy of the gradient of a per-token loss."""
    logprobs = logits.log_softmax(0)
    losses = per_token(logprobs, reference.log_softmax(0))
    loss = (logprobs.detach().exp() * losses).sum()
    return torch.autograd.grad(loss, logits)[0]


def kl_gradient(logits, first, second):
    p, q = first.log_softmax(0), second.log_softmax(0)
    return torch.autograd.grad((p.exp() * (p - q)).sum(), logits)[0]


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_as_losses_the_three_are_different_objectives(seed):
    """The table in the module: k1 does nothing, k2 is the reverse KL, k3 the forward one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(9, generator=generator, dtype=torch.float64)
    close = dict(rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        expected_gradient(logits, reference, k1), torch.zeros(9, dtype=torch.float64), **close
    )
    torch.testing.assert_close(
        expected_gradient(logits, reference, k2), kl_gradient(logits, logits, reference), **close
    )
    torch.testing.assert_close(
        expected_gradient(logits, reference, k3), kl_gradient(logits, reference, logits), **close
    )


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_k1_and_k3_are_unbiased(seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    q = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * k1(p, q)).sum(), exact, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close((p.exp() * k3(p, q)).sum(), exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("estimator", "derivative"),
    [
        (k1, lambda d: 1.0),
        (k2, lambda d: -d),
        (k3, lambda d: 0.0 if d > MAX_LOG_RATIO else -math.expm1(d)),
    ],
)
@given(policy=logprob, reference=logprob)
@settings(deadline=None, max_examples=60)
def test_gradients(estimator, derivative, policy, reference):
    logprobs = torch.tensor([[policy]], requires_grad=True)
    ref = torch.tensor([[reference]], requires_grad=True)
    estimator(logprobs, ref).sum().backward()
    d = reference - policy
    assert logprobs.grad.item() == pytest.approx(derivative(d), rel=1e-5, abs=1e-7)
    assert ref.grad is None


def test_extremes_stay_finite():
    logprobs = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    value = k3(logprobs, torch.tensor([[0.0, -1e4]]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logprobs.grad).all()
    assert logprobs.grad.tolist() == [[0.0, 1.0]]


def test_errors_name_what_was_wrong():
    with pytest.raises(ValueError, match=r"ref_logprobs have shape \[2, 3\]"):
        k1(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="ref_logprobs is torch.bfloat16"):
        k3(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16))
