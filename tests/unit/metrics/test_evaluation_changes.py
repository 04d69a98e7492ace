import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.metrics import MetricsLine, Rollout, evaluation_changes, pair_answers
from megatron_rl.metrics.evaluations import spread


def line(step, **metrics):
    return MetricsLine(
        step=step, time_s=0.0, metrics={key.replace("__", "/"): v for key, v in metrics.items()}
    )


def answer(prompt, *, accuracy=1.0, mode="greedy"):
    return Rollout(
        step=0,
        data_source="d",
        prompt=prompt,
        response="",
        ground_truth="",
        score=0.0,
        accuracy=accuracy,
        truncated=False,
        response_length_tokens=0,
        mode=mode,
    )


def at(step, source, value, measure="acc/mean"):
    return MetricsLine(step=step, time_s=0.0, metrics={f"val-core/{source}/{measure}": value})


def test_before_is_step_0_and_after_the_last_evaluation_in_any_line_order():
    lines = [at(step, "a/b", value) for step, value in ((0, 0.1), (10, 0.3), (20, 0.25))]
    for seed in range(6):
        random.Random(seed).shuffle(lines)
        (change,) = evaluation_changes(lines)
        assert (change.source, change.measure, change.num_samples) == ("a/b", "acc", 0)
        assert (change.before, change.after, change.after_step) == (0.1, 0.25, 20)
        assert change.change == pytest.approx(0.15)


def test_a_missing_side_stays_missing():
    (only_before,) = evaluation_changes([at(0, "s", 0.1)])
    assert (only_before.before, only_before.after, only_before.change) == (0.1, None, None)
    (only_after,) = evaluation_changes([at(10, "s", 0.1), at(20, "s", 0.3)])
    assert (only_after.before, only_after.after, only_after.change) == (None, 0.3, None)
    assert evaluation_changes([line(1, critic__rewards__mean=1.0)]) == []


def test_of_one_step_evaluated_twice_the_later_line_counts():
    (change,) = evaluation_changes(
        [at(0, "s", 0.5), at(0, "s", 0.1), at(4, "s", 0.2), at(4, "s", 0.3)]
    )
    assert (change.before, change.after) == (0.1, 0.3)


def test_greedy_before_sampled_and_accuracy_before_reward():
    measures = ("reward/mean@4", "acc/mean@4", "reward/mean", "acc/mean")
    changes = evaluation_changes([at(0, "s", 0.1, measure) for measure in measures])
    assert [(item.measure, item.decoding) for item in changes] == [
        ("acc", "greedy"),
        ("reward", "greedy"),
        ("acc", "mean@4"),
        ("reward", "mean@4"),
    ]


def test_answers_pair_by_row_among_greedy_ones():
    before = [answer("p1"), answer("p1", mode="sampled"), answer("p2", accuracy=0.0), answer("p3")]
    after = [answer("p1", accuracy=0.0), answer("p2"), answer("p2", mode="sampled"), answer("new")]
    pairs = pair_answers(before, after)
    assert [(pair.before.prompt, pair.after.prompt) for pair in pairs] == [
        ("p1", "p1"),
        ("p2", "p2"),
    ]
    assert [(pair.before.is_correct, pair.after.is_correct) for pair in pairs] == [
        (True, False),
        (False, True),
    ]


@given(st.integers(0, 30), st.integers(0, 200))
def test_spread_is_even_sorted_and_without_repeats(count, total):
    chosen = spread(count, total)
    assert len(chosen) == min(count, total)
    assert chosen == sorted(set(chosen))
    assert all(0 <= index < total for index in chosen)
    if 2 <= count <= total:
        assert (chosen[0], chosen[-1]) == (0, total - 1)
        gaps = [right - left for left, right in zip(chosen, chosen[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1
