"""When one rank's sampling is late, every rank stops, after the same step and with one sentence."""

from pathlib import Path

import pytest

from support.launch import run_distributed


@pytest.mark.distributed
def test_one_late_rank_stops_all():
    output = run_distributed(Path(__file__).with_name("late_sampling.py"), nproc=2, timeout_s=240)
    for rank in (0, 1):
        line = f"rank {rank}: sampling did not end within 5 s: 3 of 4 responses were finished"
        assert output.count(line) == 1
