import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.metrics import Metric, MetricAccumulator, reduce_metrics

REDUCTIONS = ("mean", "sum", "max", "min")
VALUES = st.floats(allow_nan=True, allow_infinity=True)
WEIGHTS = st.floats(min_value=0, max_value=1e6)


@st.composite
def records(draw: st.DrawFn) -> list[Metric]:
    """Records of several keys; a key always has one reduction."""
    names = {f"{reduction}/{number}": reduction for reduction in REDUCTIONS for number in range(2)}
    drawn = []
    for key in draw(st.lists(st.sampled_from(sorted(names)), max_size=12)):
        weight = draw(WEIGHTS) if names[key] == "mean" else 1.0
        drawn.append(Metric(key, draw(VALUES), names[key], weight=weight))
    return drawn


def same(left: dict[str, float], right: dict[str, float]) -> bool:
    """Equality to the last bit, NaN equal to NaN."""
    return left.keys() == right.keys() and all(
        left[key] == right[key] or (math.isnan(left[key]) and math.isnan(right[key]))
        for key in left
    )


@given(records(), st.randoms(use_true_random=False))
def test_order_does_not_matter(drawn, random):
    shuffled = drawn.copy()
    random.shuffle(shuffled)
    assert same(reduce_metrics(drawn), reduce_metrics(shuffled))


@given(records(), st.data())
def test_partition_over_ranks_does_not_matter(drawn, data):
    ranks = [MetricAccumulator() for _ in range(3)]
    for record in drawn:
        ranks[data.draw(st.integers(0, 2))].add(record)
    whole = reduce_metrics(drawn)
    for order in itertools.permutations(ranks):
        merged = MetricAccumulator()
        for rank in order:
            merged.merge(pickle.loads(pickle.dumps(rank)))
        assert same(merged.result(), whole)


def test_merge_leaves_the_merged_accumulator_alone():
    left, right = MetricAccumulator(), MetricAccumulator()
    left.add(Metric("a", 1.0, "sum"))
    right.add(Metric("a", 2.0, "sum"))
    left.merge(right)
    right.add(Metric("a", 5.0, "sum"))
    assert left.result() == {"a": 3.0}
    assert right.result() == {"a": 7.0}


@given(
    st.lists(
        st.tuples(st.integers(-(10**6), 10**6).map(lambda n: n / 7), st.floats(0.001, 1e3)),
        min_size=1,
        max_size=20,
    )
)
def test_weighted_mean_agrees_with_numpy(pairs):
    values, weights = zip(*pairs, strict=True)
    reduced = reduce_metrics(Metric("m", value, "mean", weight=weight) for value, weight in pairs)[
        "m"
    ]
    # NumPy rounds at every addition, so it may cancel badly; the scale of the terms bounds that.
    scale = max(abs(value) for value in values)
    assert reduced == pytest.approx(np.average(values, weights=weights), rel=0, abs=1e-12 * scale)


def test_mean_of_micro_batches_is_the_mean_of_tokens():
    tokens = np.random.default_rng(0).normal(size=1000)
    parts = np.split(tokens, [3, 10, 500])
    reduced = reduce_metrics(
        Metric("entropy", part.mean(), "mean", weight=len(part)) for part in parts
    )["entropy"]
    assert reduced == pytest.approx(tokens.mean(), rel=1e-12)
    assert reduced != pytest.approx(np.mean([part.mean() for part in parts]), rel=1e-3)


def test_last_is_the_last_added_or_merged():
    first, second = MetricAccumulator(), MetricAccumulator()
    first.add(Metric("lr", 1.0, "last"))
    first.add(Metric("lr", 3.0, "last"))
    second.add(Metric("lr", 2.0, "last"))
    assert first.result() == {"lr": 3.0}
    first.merge(second)
    assert first.result() == {"lr": 2.0}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_is_never_hidden(reduction):
    for values in itertools.permutations((1.0, math.nan, math.inf)):
        reduced = reduce_metrics(Metric("x", value, reduction) for value in values)
        assert math.isnan(reduced["x"])


def test_sums_cancel_exactly_and_overflow_to_infinity():
    assert reduce_metrics(Metric("x", v, "sum") for v in (1e308, 1.0, -1e308)) == {"x": 1.0}
    assert reduce_metrics(Metric("x", 1e308, "sum") for _ in range(3)) == {"x": math.inf}


def test_mean_of_no_weight_is_nan():
    assert math.isnan(reduce_metrics([Metric("x", 1.0, "mean", weight=0.0)])["x"])


@pytest.mark.parametrize(
    "other", [Metric("x", 1.0, "sum"), Metric("x", 1.0, "mean", unit="tokens")]
)
def test_one_key_with_two_meanings_is_refused(other):
    with pytest.raises(ValueError, match="'x' is recorded as mean .*give one of the two another"):
        reduce_metrics([Metric("x", 1.0, "mean"), other])
    left, right = MetricAccumulator(), MetricAccumulator()
    left.add(Metric("x", 1.0, "mean"))
    right.add(other)
    with pytest.raises(ValueError, match="another key"):
        left.merge(right)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "median"}, "use one of mean, sum, max, min, last"),
        ({"reduction": "mean", "weight": -1.0}, "finite number, 0 or more"),
        ({"reduction": "mean", "weight": math.inf}, "finite number, 0 or more"),
        ({"reduction": "max", "weight": 2.0}, "drop the weight or use reduction='mean'"),
    ],
)
def test_records_that_cannot_be_reduced_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Metric("x", 1.0, **options)
