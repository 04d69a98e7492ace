"""Runs a script on several processes with `torch.distributed.run`, for tests over gloo.

It reports and cleans up; what the script computes, and which process group it makes, is its own.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

_TAIL_LINES = 60


def run_distributed(
    script: Path,
    nproc: int,
    args: Sequence[str] = (),
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run `script` on `nproc` ranks of this machine and fail the test unless all of them succeed.

    Args:
        script: The Python file that every rank runs.
        nproc: Number of ranks.
        args: Arguments of the script.
        timeout_s: Seconds until all processes are killed and the test fails.
        env: Variables set on top of the present environment.

    Returns:
        Standard output and standard error of all ranks, interleaved.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), str(script), *args]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # gloo on the loopback device works where the host's name does not resolve; no rank is to
        # take a GPU.
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        **(env or {}),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_tree(process)
        output, _ = process.communicate()
        pytest.fail(f"{script.name}: not done after {timeout_s} s, killed.\n{_tail(output)}")
    except BaseException:  # an interrupted test leaves no ranks behind
        _kill_tree(process)
        raise
    if process.returncode != 0:
        pytest.fail(f"{script.name}: exit status {process.returncode}.\n{_tail(output)}")
    return output


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and its ranks, each of which leads a session of its own."""
    launcher = psutil.Process(process.pid)
    for member in [*launcher.children(recursive=True), launcher]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_TAIL_LINES:])
