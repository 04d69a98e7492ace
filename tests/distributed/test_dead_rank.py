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


@pytest.mark.distributed
@pytest.mark.slow
def test_a_hung_rank_ends_the_job_within_the_limit():
    start = time.monotonic()
    script = Path(__file__).with_name("dead_rank.py")
    with pytest.raises(pytest.fail.Exception) as failure:
        run_distributed(script, nproc=2, args=["hang"], timeout_s=150)
    # Starting two ranks and Megatron takes most of it; the limit is 5 s.
    assert time.monotonic() - start < 100
    message = str(failure.value)
    assert "went on without" not in message and "not done after" not in message
    assert "Timed out" in message, message
