"""The launcher that the distributed tests stand on: it reports success, failure and a hang."""

import re
import textwrap
import time

import psutil
import pytest

from support.launch import run_distributed

pytestmark = pytest.mark.distributed


def _script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(body))
    return path


def test_ranks_meet_over_gloo(tmp_path):
    script = _script(
        tmp_path,
        """
        import sys
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()} {sys.argv[1:]}")
        dist.destroy_process_group()
        """,
    )
    output = run_distributed(script, 2, args=["--x", "1"])
    assert "rank 0 of 2: 3.0 ['--x', '1']" in output
    assert "rank 1 of 2: 3.0 ['--x', '1']" in output


def test_one_failing_rank_fails_the_test_with_its_output(tmp_path):
    script = _script(
        tmp_path,
        """
        import os

        if os.environ["RANK"] == "1":
            raise SystemExit(os.environ["REASON"])
        """,
    )
    with pytest.raises(pytest.fail.Exception, match="the reason given"):
        run_distributed(script, 2, env={"REASON": "the reason given"})


def test_a_hang_is_killed_with_every_rank(tmp_path):
    script = _script(
        tmp_path,
        """
        import os
        import time

        print(f"rank pid {os.getpid()}.", flush=True)
        time.sleep(600)
        """,
    )
    with pytest.raises(pytest.fail.Exception, match="not done after 15 s") as failure:
        run_distributed(script, 2, timeout_s=15)
    pids = [int(pid) for pid in re.findall(r"rank pid (\d+)\.", str(failure.value))]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_runs, pids))


def _runs(pid):
    try:
        # A zombie is dead: only nobody has read its exit status, as happens in containers.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
