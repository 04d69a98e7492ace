"""Micro-batch plans: a partition within the budget, the same for every rank count."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.micro_batches import plan_for_ranks, plan_micro_batches

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(lengths, st.integers(1, 500))
def test_every_item_once_and_within_the_budget(items, budget):
    plan = plan_micro_batches(items, budget)
    assert sorted(i for batch in plan for i in batch) == list(range(len(items)))
    assert all(len(b) == 1 or sum(items[i] for i in b) <= budget for b in plan)
    assert plan == plan_micro_batches(items, budget)


@given(lengths, st.integers(1, 500))
def test_first_fit_wastes_less_than_half(items, budget):
    plan = plan_micro_batches(items, budget)
    loads = [sum(items[i] for i in batch) for batch in plan]
    assert sum(load <= budget / 2 for load in loads) <= 1


@given(lengths, st.integers(1, 500), st.integers(1, 4))
def test_ranks_run_the_same_number_of_micro_batches(items, budget, ranks):
    plans = plan_for_ranks(items, ranks, budget)
    assert sorted(i for p in plans for b in p for i in b) == list(range(len(items)))
    assert len({len(plan) for plan in plans}) == 1
    assert all(len(b) <= 1 or sum(items[i] for i in b) <= budget for p in plans for b in p)
    shares = [sum(items[i] for b in plan for i in b) for plan in plans]
    assert max(shares) - min(shares) <= max(items)


def test_one_rank_is_the_plain_plan():
    items = [5, 3, 8, 1, 9, 2]
    assert plan_for_ranks(items, 1, 10) == [plan_micro_batches(items, 10)]
