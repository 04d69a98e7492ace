import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import (
    ESTIMATOR_NAMES,
    dr_grpo,
    get_estimator,
    grpo,
    reinforce_baseline,
    rloo,
)

ESTIMATORS = [get_estimator(name) for name in ESTIMATOR_NAMES]
GROUPED = [grpo, dr_grpo, rloo]

rewards_and_ids = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from([0.0, 0.1, 1.0, -1.0]),
            st.floats(-100, 100, width=32, allow_subnormal=False),
        ),
        st.integers(-3, 3),
    ),
    max_size=24,
)


def tensors(pairs):
    return (
        torch.tensor([r for r, _ in pairs], dtype=torch.float32),
        torch.tensor([g for _, g in pairs], dtype=torch.int64),
    )


def literal(name, rewards, ids, epsilon=1e-6):
    """The equations, sample by sample, in Python floats."""
    rewards, ids = rewards.tolist(), ids.tolist()
    result = []
    for i, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, ids, strict=True)) if g == group]
        rest = [
            r for j, (r, g) in enumerate(zip(rewards, ids, strict=True)) if g == group and j != i
        ]
        if name == "reinforce_baseline":
            spread = max(rewards) != min(rewards)
            result.append(reward - statistics.fmean(rewards) if spread else 0.0)
        elif len(others) == 1 or max(others) == min(others):
            result.append(0.0)
        elif name == "rloo":
            result.append(reward - statistics.fmean(rest))
        else:
            centred = reward - statistics.fmean(others)
            scale = statistics.stdev(others) + epsilon if name == "grpo" else 1.0
            result.append(centred / scale)
    return torch.tensor(result, dtype=torch.float32)


@pytest.mark.parametrize("name", ESTIMATOR_NAMES)
@given(pairs=rewards_and_ids)
@settings(deadline=None, max_examples=60)
def test_agrees_with_the_equation(name, pairs):
    rewards, ids = tensors(pairs)
    torch.testing.assert_close(
        get_estimator(name)(rewards, ids).values,
        literal(name, rewards, ids),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(pairs=rewards_and_ids, seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_order_of_arrival_does_not_change_a_bit(estimator, pairs, seed):
    rewards, ids = tensors(pairs)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    before, after = estimator(rewards, ids), estimator(rewards[order], ids[order])
    assert torch.equal(before.values[order], after.values)
    assert before.num_zero_spread_groups == after.num_zero_spread_groups
    assert before.num_singleton_groups == after.num_singleton_groups


@pytest.mark.parametrize("estimator", GROUPED)
@given(pairs=rewards_and_ids)
@settings(deadline=None, max_examples=40)
def test_a_group_is_alone_in_the_world(estimator, pairs):
    """Other groups and the ids' values do not matter, and a group's advantages sum to zero."""
    rewards, ids = tensors(pairs)
    together = estimator(rewards, ids).values
    assert torch.equal(together, estimator(rewards, ids * 1000 + 7).values)
    for group in ids.unique():
        member = ids == group
        assert torch.equal(together[member], estimator(rewards[member], ids[member]).values)
        assert abs(together[member].double().sum().item()) <= 1e-6 * (
            1 + together[member].abs().sum().item()
        )


@pytest.mark.parametrize("estimator", GROUPED)
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    size=st.integers(2, 17),
    other=st.floats(-5, 5, width=32),
)
@settings(deadline=None, max_examples=60)
def test_equal_rewards_give_exactly_zero(estimator, reward, size, other):
    """0.1 * 3 / 3 is not 0.1: a mean-based test for zero spread would leave a rounding error."""
    rewards = torch.tensor([reward] * size + [other, other + 1.0], dtype=torch.float32)
    ids = torch.tensor([4] * size + [9, 9])
    result = estimator(rewards, ids)
    assert torch.equal(result.values[:size], torch.zeros(size))
    assert result.num_zero_spread_groups == 1
    assert result.num_singleton_groups == 0


@pytest.mark.parametrize("estimator", GROUPED)
def test_the_rounding_of_a_mean_is_no_advantage(estimator):
    """In float64 the mean of three times 0.1 is not 0.1."""
    rewards = torch.tensor([0.1] * 3, dtype=torch.float64)
    assert (rewards - rewards.sum() / 3).abs().max() > 0
    assert torch.equal(estimator(rewards, torch.zeros(3, dtype=torch.int64)).values, torch.zeros(3))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sums_that_depend_on_their_order_do_not(estimator):
    """1e16 + 1 - 1e16 is 0 or 1, depending on the order."""
    rewards = torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)
    ids = torch.zeros(4, dtype=torch.int64)
    expected = estimator(rewards, ids).values
    for order in itertools.permutations(range(4)):
        index = torch.tensor(order)
        assert torch.equal(estimator(rewards[index], ids).values, expected[index])


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_single_sample_has_no_advantage_and_no_nan(estimator):
    result = estimator(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([5, 2, 5]))
    assert result.values[1] == 0
    assert torch.isfinite(result.values).all()
    assert (result.num_singleton_groups, result.num_zero_spread_groups) == (1, 0)


def test_groups_are_by_id_when_samples_are_interleaved_and_one_is_missing():
    rewards = torch.tensor([1.0, 10.0, 0.0, 12.0, 14.0])
    ids = torch.tensor([0, 1, 0, 1, 1])
    assert dr_grpo(rewards, ids).values.tolist() == [0.5, -2.0, -0.5, 0.0, 2.0]
    assert grpo(rewards, ids).values.tolist() == pytest.approx(
        [math.sqrt(0.5), -1.0, -math.sqrt(0.5), 0.0, 1.0], abs=2e-6
    )
    assert rloo(rewards, ids).values.tolist() == [1.0, -3.0, -1.0, 0.0, 3.0]


@given(
    scale=st.sampled_from([0.25, 2.0, 1024.0]),
    shift=st.sampled_from([-8.0, 0.0, 3.0]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=25)
def test_grpo_ignores_scale_and_shift_of_rewards(scale, shift, seed):
    rewards = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(seed)).float()
    ids = torch.arange(12) % 3
    torch.testing.assert_close(
        grpo(rewards * scale + shift, ids).values, grpo(rewards, ids).values, rtol=1e-5, atol=1e-5
    )


def test_grpo_without_std_is_dr_grpo():
    rewards, ids = torch.randn(10), torch.arange(10) % 3
    assert torch.equal(
        grpo(rewards, ids, normalize_by_std=False).values, dr_grpo(rewards, ids).values
    )


def test_reinforce_baseline_over_the_batch():
    rewards, ids = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0, 1, 1, 2])
    result = reinforce_baseline(rewards, ids)
    assert result.values.tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert (result.num_zero_spread_groups, result.num_singleton_groups) == (1, 2)
    normalised = reinforce_baseline(rewards, ids, normalize_by_std=True).values
    assert normalised.std().item() == pytest.approx(1.0, abs=1e-5)
    same = reinforce_baseline(torch.full((3,), 0.1), torch.arange(3), normalize_by_std=True)
    assert torch.equal(same.values, torch.zeros(3))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(estimator, bad):
    with pytest.raises(ValueError, match=f"reward of sample 2 is {bad}"):
        estimator(torch.tensor([0.0, 1.0, bad, bad]), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_empty_batch_is_no_error(estimator):
    result = estimator(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert result.values.shape == (0,)
    assert (result.num_zero_spread_groups, result.num_singleton_groups) == (0, 0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_are_float32_and_carry_no_gradient(estimator):
    rewards = torch.tensor([1, 0, 1, 1])
    values = estimator(rewards, torch.zeros(4, dtype=torch.int32)).values
    assert values.dtype == torch.float32 and not values.requires_grad
    rewards = torch.tensor([0.5, 0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert not estimator(rewards, torch.zeros(4, dtype=torch.int64)).values.requires_grad


def test_errors_name_what_was_wrong():
    with pytest.raises(ValueError, match="'gae'.*grpo, dr_grpo, rloo, reinforce_baseline"):
        get_estimator("gae")
    with pytest.raises(ValueError, match=r"\[4\] and group_ids \[2\]"):
        grpo(torch.zeros(4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="group_ids are torch.float32"):
        grpo(torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match="epsilon is 0"):
        grpo(torch.zeros(4), torch.zeros(4, dtype=torch.int64), epsilon=0.0)
