"""Contenders answer in turn, do nothing in between, and their end is an error that shows why."""

import time

import pytest

from benchmarks._common import Contender, Spread, markdown_table
from benchmarks.step import holds


@pytest.fixture
def echo(tmp_path):
    contender = Contender("echo", "tests.support.echo_contender", {"x": 1}, tmp_path / "log")
    yield contender
    contender.close()


def test_a_contender_answers_and_is_stopped_between_its_turns(echo):
    assert echo.ready["x"] == 1
    before = echo.turn({"x": 2})
    time.sleep(1.0)
    after = echo.turn({"x": 3})

    assert (before["x"], after["x"]) == (2, 3)
    assert after["ticks"] - before["ticks"] < 300, "its thread ran while it was stopped"


def test_a_contender_that_ends_is_an_error_with_its_last_words(echo):
    with pytest.raises(RuntimeError, match="(?s)echo ended before it answered.*told to end"):
        echo.turn({"end": True})


def test_spread_and_bounds():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert holds(0.95, ">= 0.95") and not holds(0.94, ">= 0.95")
    assert holds(1.1, "<= 1.10") and not holds(1.11, "<= 1.10")
    assert markdown_table(["a", "b"], [["x", "1"]]).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x | 1 |",
    ]
