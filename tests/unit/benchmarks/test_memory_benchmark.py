"""The two heads that the memory benchmark compares compute the same."""

import pytest

from benchmarks.memory import measure


def test_both_heads_give_the_same_logprobs_and_gradients():
    chunked, plain = (measure(method, 512, 96, 64, 32) for method in ("chunked", "plain"))

    assert chunked["logprob"] == pytest.approx(plain["logprob"], rel=1e-5)
    assert chunked["grad"] == pytest.approx(plain["grad"], rel=5e-3)
