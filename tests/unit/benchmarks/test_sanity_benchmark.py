"""What the sanity test reads off a run's metrics."""

import pytest

from benchmarks.sanity import WINDOW_STEPS, summary


def steps(accuracies):
    return [{"train/accuracy": a, "rollout_corr/logp_diff_abs_mean": 0.25} for a in accuracies]


def test_a_run_passes_by_its_last_steps_not_by_its_best():
    low, high = [0.5] * WINDOW_STEPS, [0.98] * WINDOW_STEPS
    learned = summary(steps(low + high))
    assert learned["first"] == pytest.approx(0.5) and learned["last"] == pytest.approx(0.98)
    assert learned["passes"] and learned["steps_to_pass"] == 2 * WINDOW_STEPS
    assert learned["mismatch"] == 0.25 and learned["skipped"] == 0
    collapsed = summary(steps(high + low))
    assert not collapsed["passes"] and collapsed["steps_to_pass"] == WINDOW_STEPS
    assert summary(steps(low))["steps_to_pass"] is None


def test_skipped_steps_are_counted():
    assert summary([s | {"actor/skipped_steps": 2.0} for s in steps([0.5] * 3)])["skipped"] == 6
