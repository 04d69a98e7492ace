"""A rank that dies ends the job, within the time limit of a collective, with the rank named."""

import time
from pathlib import Path

import pytest

from support.launch import run_distributed


@pytest.mark.distributed
def test_a_dead_rank_ends_the_job():
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed(Path(__file__).with_name("dead_rank.py"), nproc=2, timeout_s=100)
    assert time.monotonic() - start < 60
    message = str(failure.value)
    assert "went on without" not in message
    assert "exitcode  : 7" in message and "rank      : 1" in message
