import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.metrics import (
    Rollout,
    RunWriteError,
    evaluation_path,
    list_rollouts,
    read_rollouts,
    rollouts_path,
    start_rollouts,
    write_rollouts,
)

ANY_TEXT = st.text(alphabet=st.characters(), max_size=30)
JSON_VALUE = st.none() | st.booleans() | st.integers() | ANY_TEXT | st.lists(ANY_TEXT, max_size=2)
ROLLOUTS = st.builds(
    Rollout,
    step=st.integers(0, 10**6),
    data_source=ANY_TEXT,
    prompt=ANY_TEXT,
    response=ANY_TEXT,
    ground_truth=JSON_VALUE,
    score=st.floats(allow_nan=False),
    accuracy=st.none() | st.floats(0, 1),
    truncated=st.booleans(),
    response_length_tokens=st.integers(0, 10**6),
    advantage=st.none() | st.floats(allow_nan=False),
    mode=st.sampled_from([None, "greedy", "sampled"]),
)


def rollout(**changes):
    fields = {
        "step": 1,
        "data_source": "d",
        "prompt": "p",
        "response": "r",
        "ground_truth": "g",
        "score": 1.0,
        "accuracy": 1.0,
        "truncated": False,
        "response_length_tokens": 2,
    }
    return Rollout(**{**fields, **changes})


@given(st.lists(ROLLOUTS, max_size=5))
def test_rollouts_survive_the_file_in_order(tmp_path_factory, rollouts):
    path = rollouts_path(tmp_path_factory.mktemp("run"), 1)
    write_rollouts(path, rollouts)
    assert read_rollouts(path) == rollouts


def test_lines_hold_the_keys_of_the_run_directory(tmp_path):
    training = rollouts_path(tmp_path, 12)
    write_rollouts(training, [rollout(advantage=0.5, accuracy=None, score=math.inf)])
    assert training == tmp_path / "rollouts" / "step_000012.jsonl"
    assert json.loads(training.read_text()) == {
        "step": 1,
        "data_source": "d",
        "prompt": "p",
        "response": "r",
        "ground_truth": "g",
        "score": "inf",
        "accuracy": None,
        "truncated": False,
        "advantage": 0.5,
        "response_length_tokens": 2,
    }
    evaluation = evaluation_path(tmp_path, 0)
    write_rollouts(evaluation, [rollout(mode="greedy")])
    assert evaluation == tmp_path / "rollouts" / "eval_000000.jsonl"
    assert json.loads(evaluation.read_text()).keys() == {
        *json.loads(training.read_text()).keys() - {"advantage"},
        "mode",
    }


def test_nan_scores_and_odd_ground_truths_are_kept_readable(tmp_path):
    path = rollouts_path(tmp_path, 1)
    write_rollouts(path, [rollout(score=math.nan, ground_truth={1, 2})])
    (read,) = read_rollouts(path)
    assert math.isnan(read.score)
    assert read.ground_truth == str({1, 2})


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = rollouts_path(tmp_path, 1)
    write_rollouts(path, [rollout(response="first")])

    def breaks_off():
        yield rollout(response="second")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rollouts(path, breaks_off())
    assert [row.response for row in read_rollouts(path)] == ["first"]
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "rollouts").write_text("")
    with pytest.raises(RunWriteError, match="cannot write .*step_000001.jsonl"):
        write_rollouts(rollouts_path(tmp_path, 1), [rollout()])


def test_listing_is_by_step_and_ignores_other_files(tmp_path):
    for step in (10, 2, 1_000_000):
        write_rollouts(rollouts_path(tmp_path, step), [])
    write_rollouts(evaluation_path(tmp_path, 0), [])
    (tmp_path / "rollouts" / "step_x.jsonl").write_text("")
    assert list(list_rollouts(tmp_path, "step")) == [2, 10, 1_000_000]
    assert list(list_rollouts(tmp_path, "eval")) == [0]
    assert list_rollouts(tmp_path / "nowhere", "step") == {}


def test_start_drops_what_will_be_redone_and_keeps_an_earlier_run(tmp_path):
    start_rollouts(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        write_rollouts(rollouts_path(tmp_path, step), [])
        write_rollouts(evaluation_path(tmp_path, step), [])
    start_rollouts(tmp_path, resume_step=2)
    assert list(list_rollouts(tmp_path, "step")) == list(list_rollouts(tmp_path, "eval")) == [1, 2]
    start_rollouts(tmp_path, resume_step=None)
    assert list_rollouts(tmp_path, "step") == {}
    assert len(list((tmp_path / "rollouts.previous-1").iterdir())) == 4


def test_damaged_lines_cost_only_themselves(tmp_path):
    path = rollouts_path(tmp_path, 1)
    write_rollouts(path, [rollout(response="a"), rollout(response="b")])
    path.write_bytes(b'{"step": 1}\n' + path.read_bytes()[:-5])
    assert [row.response for row in read_rollouts(path)] == ["a"]
