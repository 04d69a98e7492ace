"""Verifiers, and how `auto` chooses among them."""

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import DataSourceConfig, RewardConfig
from megatron_rl.data.generated import generator_request, rows_from_entries
from megatron_rl.data.generator import generate
from megatron_rl.rewards.extract import extract_answer
from megatron_rl.rewards.interface import RewardRequest, call, parse_score
from megatron_rl.rewards.manager import RewardManager
from megatron_rl.rewards.verifiers import auto, exact_match, math, reasoning_gym

RULES = ["none", "first_line", "first_number", "last_number", "boxed", "answer_tag"]


def generated(task, size=2, **options):
    source = DataSourceConfig(
        name=task, kind="reasoning_gym", task=task, size=size, task_config=options
    )
    return rows_from_entries(source, *generate(**generator_request(source)))


@given(st.text(), st.text())
def test_exact_match_never_fails_and_is_symmetric(answer, truth):
    if truth.split() and answer.split():
        assert exact_match("s", answer, truth) == exact_match("s", truth, answer)
        assert exact_match("s", f" {truth}\n", truth) == 1.0


@given(st.integers(), st.integers(0, 4))
def test_numbers_are_compared_as_numbers(number, zeros):
    assert exact_match("s", f"{number}." + "0" * zeros + "0", str(number)) == 1.0
    assert exact_match("s", str(number + 1), str(number)) == 0.0


def test_an_empty_ground_truth_rewards_nobody():
    request = RewardRequest(data_source="s", response="", ground_truth=" ")
    with RewardManager(RewardConfig(function="exact_match", failure_score=-1.0)) as manager:
        (result,) = manager.score([request])
    assert result.score == -1.0 and "no single right answer" in result.failed


def test_a_ground_truth_that_is_no_mathematics_is_a_failure_and_not_a_zero():
    with pytest.raises(ValueError, match="cannot be parsed"):
        math("s", "1", "")
    assert math("s", r"so $\boxed{\frac{2}{4}}$", "1/2") == 1.0
    assert math("s", r"\boxed{2}", r"$2$") == 1.0
    assert math("s", r"\boxed{2}", r"\boxed{2}") == 1.0
    assert math("s", "the answer is 3", "2") == 0.0


def test_tasks_are_scored_on_their_entries_as_they_were_generated():
    # The scorer of arc_agi tells tuples from lists, which JSON does not.
    for row in generated("arc_agi"):
        assert row.extra_info["verifier"] == "reasoning_gym"
        assert reasoning_gym("s", row.ground_truth, row.ground_truth, row.extra_info) == {
            "score": 1.0,
            "acc": 1.0,
        }
        wrong = reasoning_gym("s", "1 2", row.ground_truth, row.extra_info)
        assert wrong["acc"] == 0.0


def test_tasks_are_scored_with_their_own_options():
    # This scorer allows an error of one unit in the last place, which is an option of the task.
    for row in generated("decimal_arithmetic", max_num_decimal_places=5, precision=8):
        near = str(Decimal(row.ground_truth) + Decimal("0.0005"))
        own = reasoning_gym("s", near, row.ground_truth, row.extra_info)
        default = reasoning_gym("s", near, row.ground_truth, row.extra_info | {"task_config": {}})
        assert own["acc"] == 0.0 and default["acc"] == 1.0


@pytest.mark.slow
def test_every_task_accepts_its_own_answer():
    from reasoning_gym.factory import DATASETS

    refused = {}
    # composite needs options; tasks without an answer cannot be asked for one.
    for task in sorted(set(DATASETS) - {"composite"}):
        for row in generated(task):
            if not row.ground_truth:
                assert row.extra_info["verifier"] == "reasoning_gym"
                continue
            request = RewardRequest(
                data_source=task,
                response=row.ground_truth,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
            )
            result = call(auto, request, -1.0)
            if result.score < 1.0:
                refused[task] = (result.score, result.failed)
    assert not refused


def test_auto_follows_the_row():
    row = generated("basic_arithmetic")[0]
    assert row.extra_info["verifier"] == "exact_match"
    rows = {
        "exact": ({}, "1/2", "0.5", 0.0),
        "math": ({"verifier": "math"}, "1/2", "0.5", 1.0),
        "sum": (row.extra_info, row.ground_truth, row.ground_truth, 1.0),
        "unknown": ({"verifier": "absent"}, "1", "1", 0.0),
        "itself": ({"verifier": "auto"}, "1", "1", 0.0),
    }
    requests = [
        RewardRequest(data_source="s", response=response, ground_truth=truth, extra_info=extra)
        for extra, response, truth, _ in rows.values()
    ]
    with RewardManager(RewardConfig()) as manager:
        results = dict(zip(rows, manager.score(requests), strict=True))
    assert {name: r.score for name, r in results.items()} == {n: row[3] for n, row in rows.items()}
    assert "no built-in verifier" in results["unknown"].failed
    assert "no built-in verifier" in results["itself"].failed


def test_a_library_is_loaded_before_the_clock_runs():
    request = RewardRequest(data_source="s", response="$1$", ground_truth="1")
    with RewardManager(RewardConfig(function="math", timeout_s=0.3)) as manager:
        assert [r.score for r in manager.score([request] * 3)] == [1.0] * 3


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("first_line", " \n\n 13 \n4", "13"),
        ("last_number", "[1,2,3]", "3"),
        ("first_number", "10-4=6", "10"),
        ("last_number", "10-4", "4"),
        ("last_number", "x = -7", "-7"),
        ("last_number", "1,234,567.25 dollars", "1234567.25"),
        ("first_number", ".5", ".5"),
        ("last_number", "about 1.5e-3", "1.5e-3"),
        ("last_number", "it is 5.", "5"),
        ("answer_tag", "<answer>1<answer>2</answer>", "2"),
        ("answer_tag", "</answer>1<answer>2", ""),
        ("boxed", r"\boxed{1} or \boxed{2", ""),
    ],
)
def test_extraction(rule, text, expected):
    assert extract_answer(text, rule) == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", ["<answer>", "</answer>", "\\boxed{", "1,000", "-", "1e", " \n"])
def test_extraction_is_linear_in_what_a_policy_repeats(rule, unit):
    start = time.perf_counter()
    extract_answer(unit * 40_000, rule)
    assert time.perf_counter() - start < 2.0


@given(st.text(), st.sampled_from(RULES))
def test_extraction_never_fails(text, rule):
    assert isinstance(extract_answer(text, rule), str)


@given(st.integers())
def test_a_number_is_found_in_a_sentence(number):
    text = f"the answer is {number:,}."
    assert extract_answer(text, "last_number") == extract_answer(text, "first_number")
    assert extract_answer(text, "last_number") == str(number)


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    result = parse_score({"score": np.float32(0.5), "acc": np.bool_(True), "n": np.int64(3)})
    assert (result.score, result.accuracy, result.extra) == (0.5, 1.0, {"n": 3.0})
    for bad in ({"score": 1, "acc": float("nan")}, np.zeros(3), {"score": b"1"}):
        with pytest.raises((ValueError, TypeError)):
            parse_score(bad)
