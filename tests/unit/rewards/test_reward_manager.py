"""Rewards: verifiers, extraction, and functions that raise, hang, crash or print."""

import time

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.extract import extract_answer
from megatron_rl.rewards.interface import RewardRequest, parse_score
from megatron_rl.rewards.manager import RewardManager
from megatron_rl.rewards.verifiers import exact_match

USER = """
import os, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("noise on standard output")
    sys.__stdout__.flush()
    if solution_str == "raise":
        raise KeyError("broken")
    if solution_str == "hang":
        time.sleep(60)
    if solution_str == "crash":
        os._exit(7)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "good"
    if solution_str == "dict":
        return {"score": 2.5, "acc": 1, "why": "because"}
    return float(solution_str == ground_truth)
"""


def requests(*texts, truth="x", **extra):
    return [
        RewardRequest(data_source="s", response=t, ground_truth=truth, extra_info=extra)
        for t in texts
    ]


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "user.py"
    path.write_text(USER)
    return path


def test_whatever_a_user_function_does_the_batch_is_scored(user_file):
    config = RewardConfig(
        function=f"{user_file}:compute_score", timeout_s=0.5, failure_score=-1.0, num_workers=2
    )
    texts = ["x", "raise", "y", "hang", "x", "crash", "nan", "dict", "text", "x"]
    with RewardManager(config) as manager:
        start = time.monotonic()
        results = manager.score(requests(*texts))
        assert time.monotonic() - start < 15
        again = manager.score(requests("x", "y"))
    assert [r.score for r in results] == [1, -1, 0, -1, 1, -1, -1, 2.5, -1, 1]
    reasons = [r.failed for r in results]
    assert reasons[1] == "KeyError: 'broken'"
    assert reasons[3] == "timed out after 0.5 s"
    assert reasons[5] == "the worker died with status 7"
    assert "nan" in reasons[6] and "'good'" in reasons[8]
    assert [reasons[i] for i in (0, 2, 4, 7, 9)] == [None] * 5
    assert results[7].accuracy == 1.0 and results[7].extra == {"why": "because"}
    assert results[0].accuracy == 1.0 and results[2].accuracy == 0.0
    assert [r.score for r in again] == [1, 0]


def test_functions_that_cannot_be_loaded_are_refused(user_file, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import absent_module")
    for function, message in (
        (f"{user_file}:absent", "has no function 'absent'"),
        (f"{tmp_path}/no.py:f", "there is no file"),
        (f"{broken}:f", "ModuleNotFoundError"),
        ("exact", "neither a built-in"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardManager(RewardConfig(function=function))


def test_built_in_verifiers():
    with RewardManager(RewardConfig(function="math")) as manager:
        results = manager.score(requests("The answer is $\\frac{1}{2}$", "$0.4$", truth="0.5"))
        assert [r.score for r in results] == [1, 0]
    with RewardManager(RewardConfig(function="reasoning_gym")) as manager:
        task = {"task": "chain_sum", "metadata": {}, "question": "1 + 2"}
        right, wrong = manager.score(requests("3", "4", truth="3", **task))
        assert right.score == 1 and right.accuracy == 1 and wrong.accuracy == 0
        (failed,) = manager.score(requests("3", truth="3"))
        assert "not of a reasoning_gym source" in failed.failed
    manager = RewardManager(RewardConfig(function="auto", extract="first_line"))
    assert [r.score for r in manager.score(requests(" 7\n8", "7 8", truth="7"))] == [1, 0]


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("12", "12", 1),
        ("12.0", "12", 1),
        (" a  b ", "a b", 1),
        ("1e2", "100", 1),
        ("12", "13", 0),
        ("", "0", 0),
        ("A", "a", 0),
        ("NaN", "1", 0),
    ],
)
def test_exact_match(answer, truth, expected):
    assert exact_match("s", answer, truth) == expected


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("first_line", "\n 13\n4", "13"),
        ("first_line", "", ""),
        ("first_number", "it is 1,234.5 or 3", "1234.5"),
        ("last_number", "it is -4, no: -5.", "-5"),
        ("last_number", "none", ""),
        ("boxed", r"so \boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", ""),
        ("answer_tag", "<answer>1</answer> <ANSWER> 2 </ANSWER>", "2"),
        ("none", " a ", "a"),
    ],
)
def test_extraction(rule, text, expected):
    assert extract_answer(text, rule) == expected


def test_parse_score():
    assert parse_score(True).score == 1.0 and parse_score(0.5).accuracy is None
    for bad in (None, "1", [], {"acc": 1}, float("inf")):
        with pytest.raises(ValueError):
            parse_score(bad)
