import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.correction import (
    MAX_LOG_RATIO,
    geometric_rejection,
    icepop,
    sequence_mis,
    sequence_tis,
    token_tis,
)

B, S = 5, 7
RULES = {
    "token_tis": lambda t, r, m: token_tis(t, r, m, 1.2),
    "sequence_tis": lambda t, r, m: sequence_tis(t, r, m, 1.5),
    "sequence_mis": lambda t, r, m: sequence_mis(t, r, m, 1.5),
    "geometric_rejection": lambda t, r, m: geometric_rejection(t, r, m, 0.9, 1.1),
    "icepop": lambda t, r, m: icepop(t, r, m, 0.8, 1.25),
}
every_rule = pytest.mark.parametrize("name", RULES)


def make_batch(seed, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, S, generator=generator) * 4
    train = rollout + noise * torch.randn(B, S, generator=generator)
    lengths = torch.randint(0, S + 1, (B,), generator=generator)
    lengths[0] = S
    return train, rollout, torch.arange(S) < lengths[:, None]


def literal(name, train, rollout, mask):
    """Weights and mask, sequence by sequence, from the definitions."""
    weights, kept = torch.zeros(B, S), torch.zeros(B, S, dtype=torch.bool)
    for b in range(B):
        d = {t: train[b, t].item() - rollout[b, t].item() for t in range(S) if mask[b, t].item()}
        product = math.exp(sum(d.values()))
        for t, value in d.items():
            rho = math.exp(value)
            weight, keep = {
                "token_tis": lambda rho=rho: (min(rho, 1.2), True),
                "sequence_tis": lambda p=product: (min(p, 1.5), True),
                "sequence_mis": lambda p=product: (p, p <= 1.5),
                "geometric_rejection": lambda d=d: (
                    1.0,
                    0.9 <= math.exp(sum(d.values()) / len(d)) <= 1.1,
                ),
                "icepop": lambda rho=rho: (rho, 0.8 <= rho <= 1.25),
            }[name]()
            weights[b, t], kept[b, t] = (weight if keep else 0.0), keep
    return weights, kept


@every_rule
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_agrees_with_literal_loops(name, seed):
    train, rollout, mask = make_batch(seed)
    result = RULES[name](train, rollout, mask)
    weights, kept = literal(name, train, rollout, mask)
    assert torch.equal(result.mask, kept)
    torch.testing.assert_close(result.weights, weights, rtol=1e-6, atol=0)
    assert result.weights.dtype == torch.float32 and result.mask.dtype == torch.bool


@every_rule
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=10)
def test_agreement_of_the_engines_changes_nothing(name, seed):
    train, _, mask = make_batch(seed)
    result = RULES[name](train, train.clone(), mask)
    assert torch.equal(result.weights, mask.float())
    assert torch.equal(result.mask, mask)
    assert result.metrics == {
        "rollout_corr/rollout_is_mean": 1.0,
        "rollout_corr/rollout_is_max": 1.0,
        "rollout_corr/rollout_is_min": 1.0,
        "rollout_corr/rollout_is_ratio_fraction_high": 0.0,
        "rollout_corr/rollout_is_ratio_fraction_low": 0.0,
        "rollout_corr/rollout_rs_masked_fraction": 0.0,
        "rollout_corr/rollout_rs_seq_masked_fraction": 0.0,
    }


@every_rule
@given(seed=st.integers(0, 2**31), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@settings(deadline=None, max_examples=15)
def test_padding_is_never_read_nor_weighted(name, seed, garbage):
    train, rollout, mask = make_batch(seed)
    clean = RULES[name](train, rollout, mask)
    dirty = RULES[name](
        train.masked_fill(~mask, garbage), rollout.masked_fill(~mask, garbage), mask.int()
    )
    assert torch.equal(clean.weights, dirty.weights) and torch.equal(clean.mask, dirty.mask)
    assert clean.metrics == dirty.metrics
    assert (dirty.weights[~dirty.mask] == 0).all()
    assert not (dirty.mask & ~mask).any()


@every_rule
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=10)
def test_sequences_are_independent(name, seed):
    train, rollout, mask = make_batch(seed)
    whole = RULES[name](train, rollout, mask)
    for b in range(B):
        row = slice(b, b + 1)
        alone = RULES[name](train[row], rollout[row], mask[row])
        torch.testing.assert_close(alone.weights, whole.weights[row], rtol=1e-6, atol=0)
        assert torch.equal(alone.mask, whole.mask[row])


@every_rule
def test_weights_are_detached(name):
    train, rollout, mask = make_batch(0)
    result = RULES[name](train.requires_grad_(), rollout.requires_grad_(), mask)
    assert not result.weights.requires_grad


@every_rule
def test_extreme_ratios_stay_finite(name):
    train = torch.tensor([[0.0, 0.0], [-1e5, -1e5]])
    result = RULES[name](train, train.flip(0), torch.ones(2, 2))
    assert torch.isfinite(result.weights).all()
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_the_clamp_comes_before_the_exponential():
    train, rollout = torch.tensor([[0.0, -1e5]]), torch.tensor([[-1e5, 0.0]])
    result = token_tis(train, rollout, torch.ones(1, 2), math.inf)
    expected = torch.tensor([[math.exp(MAX_LOG_RATIO), math.exp(-MAX_LOG_RATIO)]])
    torch.testing.assert_close(result.weights, expected)


def test_a_sequence_is_summed_before_it_is_clamped():
    """Log ratios 50, -15, -35 cancel to an ordinary sequence; clamped first, they sum to -15."""
    train, rollout = torch.tensor([[0.0, -15.0, -35.0]]), torch.tensor([[-50.0, 0.0, 0.0]])
    mask = torch.ones(1, 3)
    for rule in (sequence_tis, sequence_mis):
        assert torch.equal(rule(train, rollout, mask, 2.0).weights, mask)
    assert torch.equal(geometric_rejection(train, rollout, mask, 0.999, 1.001).weights, mask)


def test_metrics_of_a_small_example():
    rho = torch.tensor([[0.5, 1.0, 4.0], [1.0, 1.0, 99.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    result = icepop(rho.log(), torch.zeros(2, 3), mask, 0.6, 2.0)
    assert result.mask.tolist() == [[False, True, False], [True, True, False]]
    assert result.metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": 1.0,
            "rollout_corr/rollout_is_max": 1.0,
            "rollout_corr/rollout_is_min": 1.0,
            "rollout_corr/rollout_is_ratio_fraction_high": 0.2,
            "rollout_corr/rollout_is_ratio_fraction_low": 0.2,
            "rollout_corr/rollout_rs_masked_fraction": 0.4,
            "rollout_corr/rollout_rs_seq_masked_fraction": 0.5,
        }
    )
    truncated = token_tis(rho.log(), torch.zeros(2, 3), mask, 2.0).metrics
    assert truncated["rollout_corr/rollout_is_mean"] == pytest.approx(5.5 / 5)
    assert truncated["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(0.2)
    assert truncated["rollout_corr/rollout_rs_masked_fraction"] == 0


@every_rule
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_metrics_count_response_tokens_only(name, seed):
    """A sequence rule's ratio also stands at the padding of its row, which must not be counted."""
    train, rollout, mask = make_batch(seed)
    low, high = {
        "token_tis": (0.0, 1.2),
        "sequence_tis": (0.0, 1.5),
        "sequence_mis": (0.0, 1.5),
        "geometric_rejection": (0.9, 1.1),
        "icepop": (0.8, 1.25),
    }[name]
    ratios = []
    sequences = [b for b in range(B) if mask[b].any()]
    for b in sequences:
        d = [train[b, t].item() - rollout[b, t].item() for t in range(S) if mask[b, t].item()]
        if name.startswith("sequence"):
            d = [sum(d)] * len(d)
        elif name == "geometric_rejection":
            d = [sum(d) / len(d)] * len(d)
        ratios += [math.exp(value) for value in d]
    result = RULES[name](train, rollout, mask)
    weights, kept = literal(name, train, rollout, mask)
    of_kept = weights[kept].tolist() or [0.0]
    assert result.metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": sum(of_kept) / len(of_kept),
            "rollout_corr/rollout_is_max": max(of_kept),
            "rollout_corr/rollout_is_min": min(of_kept),
            "rollout_corr/rollout_is_ratio_fraction_high": sum(r > high for r in ratios)
            / len(ratios),
            "rollout_corr/rollout_is_ratio_fraction_low": sum(r < low for r in ratios)
            / len(ratios),
            "rollout_corr/rollout_rs_masked_fraction": 1 - int(kept.sum()) / len(ratios),
            "rollout_corr/rollout_rs_seq_masked_fraction": sum(
                not torch.equal(kept[b], mask[b]) for b in sequences
            )
            / len(sequences),
        },
        rel=1e-6,
        abs=1e-12,
    )


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_rules_chain(seed):
    train, rollout, mask = make_batch(seed)
    first = geometric_rejection(train, rollout, mask, 0.9, 1.1)
    second = token_tis(train, rollout, first.mask, 1.2)
    alone = token_tis(train, rollout, mask, 1.2)
    assert torch.equal(second.mask, first.mask)
    assert torch.equal(second.weights * first.weights, alone.weights * first.mask)


@every_rule
def test_a_batch_without_response_tokens_is_no_error(name):
    result = RULES[name](torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
    assert torch.equal(result.weights, torch.zeros(2, 3)) and not result.mask.any()
    assert result.metrics == {}


def test_everything_rejected_is_no_error():
    result = sequence_mis(torch.zeros(2, 3), torch.full((2, 3), -3.0), torch.ones(2, 3), 2.0)
    assert torch.equal(result.weights, torch.zeros(2, 3))
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert result.metrics["rollout_corr/rollout_is_mean"] == 0.0


@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_named(name, bad):
    train, rollout, _ = make_batch(0)
    rollout[3, 4] = bad
    if math.isinf(bad):
        train[3, 4] = bad  # the difference of two equal infinities is NaN, not agreement
    with pytest.raises(ValueError, match=r"log-probs at \[3, 4\] are"):
        RULES[name](train, rollout, torch.ones(B, S))


def test_errors_name_what_was_wrong():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    for rule in (token_tis, sequence_tis, sequence_mis):
        with pytest.raises(ValueError, match="cap is 0.5"):
            rule(x, x, mask, 0.5)
        with pytest.raises(ValueError, match="cap is nan"):
            rule(x, x, mask, math.nan)
    for rule in (geometric_rejection, icepop):
        with pytest.raises(ValueError, match=r"the range is \[1.1, 2\]"):
            rule(x, x, mask, 1.1, 2)
        with pytest.raises(ValueError, match=r"the range is \[0, 2\]"):
            rule(x, x, mask, 0, 2)
    with pytest.raises(ValueError, match=r"rollout_lp has shape \[2, 4\]"):
        token_tis(x, torch.zeros(2, 4), mask, 2)
    with pytest.raises(ValueError, match="rollout_lp is torch.float16"):
        token_tis(x, x.half(), mask, 2)
