import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.metrics.mismatch import MismatchAccumulator, mismatch_metrics

B, S = 6, 9
KEYS = {
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/logp_diff_abs_mean",
    "rollout_corr/logp_diff_abs_max",
    "rollout_corr/log_ppl_diff",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq",
    "rollout_corr/ess",
    "rollout_corr/token_mult_prob_error",
    "rollout_corr/exact_share",
}
PEARSON = "training/rollout_actor_probs_pearson_corr"
ONES = {
    PEARSON,
    "rollout_corr/ppl_ratio",
    "rollout_corr/ess",
    "rollout_corr/token_mult_prob_error",
    "rollout_corr/exact_share",
}


def make_batch(seed, noise=0.05):
    """Some rows are empty, some tokens agree to the bit."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, S, generator=generator) * 5
    train = rollout + noise * torch.randn(B, S, generator=generator)
    agree = torch.rand(B, S, generator=generator) < 0.2
    train = torch.where(agree, rollout, train)
    lengths = torch.randint(0, S + 1, (B,), generator=generator)
    lengths[0] = S
    return train, rollout, torch.arange(S) < lengths[:, None]


def literal(train, rollout, mask):
    """The definitions of the module header, in numpy over a list of sequences."""
    rows = [
        (train[b][mask[b]].double().numpy(), rollout[b][mask[b]].double().numpy())
        for b in range(train.shape[0])
        if mask[b].any()
    ]
    t, r = (np.concatenate([row[i] for row in rows]) for i in (0, 1))
    d, rho, diff = t - r, np.exp(t - r), np.abs(np.exp(t) - np.exp(r))
    log_ppl_diff = np.array([rr.mean() - tt.mean() for tt, rr in rows])
    return {
        "training/rollout_probs_diff_mean": diff.mean(),
        "training/rollout_probs_diff_max": diff.max(),
        "training/rollout_probs_diff_std": diff.std(ddof=1),
        PEARSON: np.corrcoef(np.exp(t), np.exp(r))[0, 1],
        "rollout_corr/kl": (r - t).mean(),
        "rollout_corr/k3_kl": (rho - np.log(rho) - 1).mean(),
        "rollout_corr/logp_diff_abs_mean": np.abs(d).mean(),
        "rollout_corr/logp_diff_abs_max": np.abs(d).max(),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/ppl_ratio": np.exp(log_ppl_diff).mean(),
        "rollout_corr/chi2_token": (rho**2).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([np.prod(np.exp(tt - rr)) ** 2 for tt, rr in rows]) - 1,
        "rollout_corr/ess": 1 / np.mean((rho / rho.mean()) ** 2),
        "rollout_corr/token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "rollout_corr/exact_share": (t == r).mean(),
    }


def assert_same(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


@given(seed=st.integers(0, 2**31), noise=st.sampled_from([1e-3, 0.05, 1.0]))
@settings(deadline=None, max_examples=40)
def test_agrees_with_the_definitions(seed, noise):
    batch = make_batch(seed, noise)
    metrics = mismatch_metrics(*batch)
    assert metrics.keys() == KEYS
    assert all(type(value) is float for value in metrics.values())
    assert_same(metrics, literal(*batch))


@given(
    seed=st.integers(0, 2**31),
    assignment=st.lists(st.integers(0, 3), min_size=B, max_size=B),
    noise=st.sampled_from([1e-4, 0.05, 3.0]),
)
@settings(deadline=None, max_examples=60)
def test_any_partition_over_micro_batches_and_ranks_gives_the_same(seed, assignment, noise):
    """Rank 0 and 1 have two micro-batches each, in any order and of any size, none included."""
    train, rollout, mask = make_batch(seed, noise)
    ranks = [MismatchAccumulator(), MismatchAccumulator()]
    for part in range(4):
        rows = torch.tensor([b for b in range(B) if assignment[b] == part], dtype=torch.int64)
        width = int(mask[rows].sum(1).max()) if len(rows) else 0
        ranks[part // 2].add(train[rows, :width], rollout[rows, :width], mask[rows, :width])
    states = torch.stack([rank.state() for rank in ranks])
    merged = MismatchAccumulator.from_states(states).metrics()
    assert_same(merged, mismatch_metrics(train, rollout, mask))
    swapped = MismatchAccumulator.from_states(states.flip(0)).metrics()
    assert_same(swapped, merged)


@given(seed=st.integers(0, 2**31), size=st.sampled_from([1, 2, 40]))
@settings(deadline=None, max_examples=25)
def test_identical_inputs_give_exactly_zero(seed, size):
    train, _, mask = make_batch(seed)
    train, mask = train[:, :1].repeat(1, size), mask[:, :1].repeat(1, size)
    accumulator = MismatchAccumulator()
    accumulator.add(train, train.clone(), mask)
    accumulator.add(train * 2, train * 2, mask)
    for metrics in (mismatch_metrics(train, train.clone(), mask), accumulator.metrics()):
        for key, value in metrics.items():
            assert value == (1.0 if key in ONES else 0.0), key
            assert math.copysign(1.0, value) == 1.0, f"{key} is -0.0"


@given(
    seed=st.integers(0, 2**31),
    garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
    side=st.sampled_from([(0,), (1,), (0, 1)]),
)
@settings(deadline=None, max_examples=30)
def test_padding_is_never_read(seed, garbage, side):
    train, rollout, mask = make_batch(seed)
    dirty = [
        x.masked_fill(~mask, garbage) if i in side else x for i, x in enumerate((train, rollout))
    ]
    assert mismatch_metrics(*dirty, mask.long()) == mismatch_metrics(train, rollout, mask)


def test_one_flipped_bit_is_seen():
    """The whole point: a difference in the last place of one token is not zero."""
    train, _, _ = make_batch(0)
    rollout = train.clone()
    rollout[2, 3] = torch.nextafter(rollout[2, 3], torch.tensor(0.0))
    metrics = mismatch_metrics(train, rollout, torch.ones(B, S))
    assert metrics["rollout_corr/exact_share"] == (B * S - 1) / (B * S)
    for key in ("logp_diff_abs_max", "logp_diff_abs_mean", "k3_kl", "kl"):
        assert metrics[f"rollout_corr/{key}"] > 0
    assert metrics["training/rollout_probs_diff_max"] > 0


def test_signs():
    """The trainer finds the sampled tokens less likely, by 1%."""
    rollout = torch.full((2, 3), -1.0)
    metrics = mismatch_metrics(rollout - 0.01, rollout, torch.ones(2, 3))
    for key in ("kl", "log_ppl_diff"):
        assert metrics[f"rollout_corr/{key}"] == pytest.approx(0.01, rel=1e-4)
    assert metrics["rollout_corr/ppl_ratio"] == pytest.approx(math.exp(0.01), rel=1e-5)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0.01**2 / 2, rel=1e-2)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(math.expm1(-0.02), rel=1e-4)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(math.expm1(-0.06), rel=1e-4)
    assert metrics["rollout_corr/ess"] == pytest.approx(1.0)


def test_sequences_count_alike_and_tokens_count_alike():
    rollout = torch.zeros(2, 4)
    train = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    metrics = mismatch_metrics(train, rollout, mask)
    assert metrics["rollout_corr/kl"] == pytest.approx(1 / 5)
    assert metrics["rollout_corr/log_ppl_diff"] == pytest.approx(1 / 2)


def exact_pearson(train, rollout):
    """In rational arithmetic over the float64 probabilities, so without any cancellation."""
    p = [Fraction(float(x)) for x in train.double().exp().flatten()]
    q = [Fraction(float(x)) for x in rollout.double().exp().flatten()]
    mean_p, mean_q = sum(p) / len(p), sum(q) / len(q)
    cov = sum((x - mean_p) * (y - mean_q) for x, y in zip(p, q, strict=True))
    var = sum((x - mean_p) ** 2 for x in p) * sum((y - mean_q) ** 2 for y in q)
    return math.copysign(math.sqrt(cov * cov / var), cov)


@pytest.mark.parametrize("level", [-1e-5, -0.5, -11.0])
@pytest.mark.parametrize("spread", [1e-3, 1e-5])
def test_pearson_is_stable_when_probabilities_hardly_vary(level, spread):
    """Raw sums of squares lose everything here: the variance is 1e-10 of the squared mean."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, B, S, generator=generator, dtype=torch.float64)
    train = level * (1 + spread * noise[0])
    rollout = level * (1 + spread * (noise[0] + noise[1]))
    expected = exact_pearson(train, rollout)
    assert 0.3 < expected < 0.95
    accumulator = MismatchAccumulator()
    for b in range(B):
        accumulator.add(train[b : b + 1], rollout[b : b + 1], torch.ones(1, S))
    # exp(-1e-5 (1 + 1e-5 x)) has 6 digits of spread left in float64.
    tolerance = 1e-6 if level == -1e-5 else 1e-9
    assert accumulator.metrics()[PEARSON] == pytest.approx(expected, abs=tolerance)
    whole = mismatch_metrics(train, rollout, torch.ones(B, S))
    assert whole[PEARSON] == pytest.approx(expected, abs=tolerance)


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_bounds(seed):
    metrics = mismatch_metrics(*make_batch(seed, noise=2.0))
    assert -1 <= metrics[PEARSON] <= 1
    assert 0 < metrics["rollout_corr/ess"] <= 1
    assert metrics["rollout_corr/k3_kl"] >= 0
    assert metrics["rollout_corr/token_mult_prob_error"] >= 1
    assert metrics["training/rollout_probs_diff_mean"] <= metrics["training/rollout_probs_diff_max"]
    assert 0 <= metrics["rollout_corr/exact_share"] <= 1


@given(seed=st.integers(0, 2**31), shift=st.floats(-3, 3), size=st.integers(2, 60))
@settings(deadline=None, max_examples=60)
def test_rounding_never_leaves_the_bounds(seed, shift, size):
    """Equal ratios: ess and the correlation are 1, and rounding alone decides on which side."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(1, size, generator=generator, dtype=torch.float64) * 4
    metrics = mismatch_metrics(rollout + shift, rollout, torch.ones(1, size))
    assert 1 - 1e-12 < metrics["rollout_corr/ess"] <= 1
    assert 1 - 1e-9 < metrics[PEARSON] <= 1


def test_pearson_of_a_constant_is_undefined_and_says_so():
    constant = torch.full((2, 3), -0.7)
    assert math.isnan(mismatch_metrics(constant, constant - 1, torch.ones(2, 3))[PEARSON])
    accumulator = MismatchAccumulator()
    for _ in range(3):
        accumulator.add(constant, torch.rand(2, 3), torch.ones(2, 3))
    assert math.isnan(accumulator.metrics()[PEARSON])
    one_token = mismatch_metrics(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1))
    assert math.isnan(one_token[PEARSON])
    assert one_token["training/rollout_probs_diff_std"] == 0.0


def test_wild_tokens_stay_finite():
    train = torch.tensor([[-1e5, 0.0, -3.0]])
    for a, b in ((train, train.flip(1)), (train, torch.zeros(1, 3)), (torch.zeros(1, 3), train)):
        metrics = mismatch_metrics(a, b, torch.ones(1, 3))
        metrics.pop(PEARSON)
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["rollout_corr/logp_diff_abs_max"] > 9e4
        assert 0 < metrics["rollout_corr/ess"] <= 1
    # k3 grows linearly on this side: no clamp.
    k3 = mismatch_metrics(torch.full((1, 3), -100.0), torch.zeros(1, 3), torch.ones(1, 3))
    assert k3["rollout_corr/k3_kl"] == pytest.approx(99.0)
    # One token of three has all the weight.
    lone = mismatch_metrics(torch.zeros(1, 3), torch.tensor([[-50.0, 0.0, 0.0]]), torch.ones(1, 3))
    assert lone["rollout_corr/ess"] == pytest.approx(1 / 3)
    assert lone["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40))


def test_identical_constants_correlate():
    x = torch.full((2, 3), -0.7)
    metrics = mismatch_metrics(x, x.clone(), torch.ones(2, 3))
    assert all(value == (1.0 if key in ONES else 0.0) for key, value in metrics.items())


def test_small_mismatch_keeps_its_digits():
    """At |d| = 1e-6, exp(d) - 1 - d would have three digits left."""
    rollout = torch.full((2, 3), -1.0, dtype=torch.float64)
    metrics = mismatch_metrics(rollout + 1e-6, rollout, torch.ones(2, 3))
    d = (rollout + 1e-6 - rollout)[0, 0].item()
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-9, abs=0)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(math.expm1(2 * d), rel=1e-12, abs=0)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(math.expm1(6 * d), rel=1e-12, abs=0)


def test_state_is_a_copy_and_an_empty_part_changes_nothing():
    train, rollout, mask = make_batch(1)
    accumulator = MismatchAccumulator()
    accumulator.add(train, rollout, mask)
    before = accumulator.metrics()
    accumulator.state().zero_()
    accumulator.add(train, rollout, torch.zeros(B, S))
    accumulator.add(train[:0], rollout[:0], mask[:0])
    accumulator.merge(MismatchAccumulator().state())
    assert accumulator.metrics() == before


def test_inputs_that_need_gradients_are_read_only():
    train, rollout, mask = make_batch(1)
    expected = mismatch_metrics(train, rollout, mask)
    accumulator = MismatchAccumulator()
    accumulator.add(train.requires_grad_(), rollout.requires_grad_(), mask)
    assert not accumulator.state().requires_grad
    assert accumulator.metrics() == expected


def test_an_empty_mask_is_refused():
    for shape in ((2, 3), (0, 3), (2, 0)):
        x = torch.zeros(shape)
        with pytest.raises(ValueError, match="without response tokens"):
            mismatch_metrics(x, x, torch.zeros(shape))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_logprob_that_is_not_finite_is_named(bad, side):
    pair = [torch.zeros(B, S), torch.zeros(B, S)]
    pair[side][3, 4] = bad
    with pytest.raises(ValueError, match=r"log-probs at \[3, 4\] are"):
        mismatch_metrics(*pair, torch.ones(B, S))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[\[2, 3\], \[2, 4\], \[2, 3\]\]"):
        mismatch_metrics(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"expected one \[B, S\]"):
        mismatch_metrics(torch.zeros(3), torch.zeros(3), torch.ones(3))
