"""The log-prob head over a sharded vocabulary."""

from pathlib import Path

import pytest

from support.launch import run_distributed


@pytest.mark.distributed
def test_two_ranks_equal_one():
    output = run_distributed(Path(__file__).with_name("tp_logprobs.py"), nproc=2)
    assert output.count(": equal") == 2
