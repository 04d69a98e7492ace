"""Worker processes: what a reward function may do to them, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.interface import RewardRequest
from megatron_rl.rewards.manager import RewardManager
from megatron_rl.rewards.pool import WorkerPool

USER = """
from __future__ import annotations
import dataclasses, os, subprocess, sys, time
from beside_it import answer

@dataclasses.dataclass
class Verdict:
    value: float

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    command, _, argument = solution_str.partition(" ")
    if command == "read":
        return float(len(sys.stdin.read()))
    if command == "exit":
        sys.exit(3)
    if command == "spawn":
        process = subprocess.Popen(["sleep", "300"])
        open(argument, "w").write(str(process.pid))
        time.sleep(60)
    if command == "unlink":
        os.unlink(argument)
        os._exit(1)
    if command == "slow":
        time.sleep(0.3)
    if command == "pid":
        return {"score": 0.0, "pid": os.getpid()}
    if command == "torch":
        return float("torch" in sys.modules)
    return Verdict(answer()).value
"""


@pytest.fixture
def user_file(tmp_path):
    (tmp_path / "beside_it.py").write_text("def answer():\n    return 42.0\n")
    path = tmp_path / "user.py"
    path.write_text(USER)
    return path


def managed(path, **options):
    return RewardManager(RewardConfig(function=f"{path}:compute_score", **options))


def requests(*texts, truth="x", **extra):
    return [
        RewardRequest(data_source="s", response=t, ground_truth=truth, extra_info=extra)
        for t in texts
    ]


def ended(pid, within_s=5.0):
    """The process no longer runs (a zombie does not)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_file_may_use_its_neighbours_and_dataclasses_but_not_the_conversation(user_file):
    with managed(user_file, timeout_s=5) as manager:
        score, stdin, torch = manager.score(requests("score", "read", "torch"))
    assert score.score == 42.0
    assert stdin.score == 0.0 and stdin.failed is None
    assert torch.score == 0.0


def test_a_function_that_exits_is_a_failure(user_file):
    with managed(user_file) as manager:
        first, second = manager.score(requests("exit", "score"))
    assert first.failed == "the worker died with status 3" and second.score == 42.0


def test_what_a_killed_function_started_is_killed_too(user_file, tmp_path):
    note = tmp_path / "pid"
    with managed(user_file, timeout_s=1.0) as manager:
        (result,) = manager.score(requests(f"spawn {note}"))
    assert result.failed == "timed out after 1 s"
    assert ended(int(note.read_text()))


def test_results_keep_their_order_over_several_workers(user_file):
    texts = ["slow", "score", "slow", "pid", "score", "pid"] * 2
    with managed(user_file, num_workers=3) as manager:
        results = manager.score(requests(*texts))
    expected = [0.0 if text == "pid" else 42.0 for text in texts]
    assert [result.score for result in results] == expected


def test_a_worker_that_died_between_batches_is_replaced(user_file):
    with managed(user_file) as manager:
        (first,) = manager.score(requests("pid"))
        os.kill(first.extra["pid"], signal.SIGKILL)
        assert ended(first.extra["pid"])
        (second,) = manager.score(requests("pid"))
    assert second.failed is None and second.extra["pid"] != first.extra["pid"]


def test_a_function_that_cannot_be_loaded_again_fails_the_batch_and_not_the_run(user_file):
    with managed(user_file, failure_score=-1.0) as manager:
        results = manager.score(requests(f"unlink {user_file}", "score", "score"))
        assert [result.score for result in results] == [-1.0] * 3
        assert results[0].failed == "the worker died with status 1"
        assert "there is no file" in results[2].failed
        user_file.write_text(USER)
        assert manager.score(requests("score"))[0].score == 42.0


def test_signals_to_the_trainer_do_not_reach_a_batch(user_file):
    with managed(user_file) as manager:
        (first,) = manager.score(requests("pid"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(first.extra["pid"], number)
        (second,) = manager.score(requests("pid"))
    assert second.extra["pid"] == first.extra["pid"]


def test_closing_leaves_no_process(user_file):
    manager = managed(user_file, num_workers=2)
    pids = {r.extra["pid"] for r in manager.score(requests(*["pid"] * 8))}
    manager.close()
    manager.close()
    assert all(ended(pid) for pid in pids)


PROGRAM = """
import signal
# A shell starts its background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from megatron_rl.config import RewardConfig
from megatron_rl.rewards.interface import RewardRequest
from megatron_rl.rewards.manager import RewardManager
manager = RewardManager(RewardConfig(function={function!r}, timeout_s={timeout_s}))
def request(text):
    return RewardRequest(data_source="s", response=text, ground_truth="")
print(manager.score([request("pid")])[0].extra["pid"], flush=True)
manager.score([request({then!r})])
"""


def start_program(user_file, then, timeout_s):
    text = PROGRAM.format(function=f"{user_file}:compute_score", then=then, timeout_s=timeout_s)
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_interrupt_ends_the_program_and_its_workers(user_file, tmp_path):
    note = tmp_path / "pid"
    program = start_program(user_file, f"spawn {note}", 60)
    worker = int(program.stdout.readline())
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert ended(worker) and ended(int(note.read_text()))


def test_an_idle_worker_ends_with_its_trainer(user_file):
    program = start_program(user_file, "score", 60)
    worker = int(program.stdout.readline())
    program.communicate(timeout=60)
    assert program.returncode == 0 and ended(worker)


def test_a_hanging_worker_ends_itself_when_its_trainer_is_gone(user_file, tmp_path):
    request = {"data_source": "", "ground_truth": "", "extra_info": {}}
    request["response"] = f"spawn {tmp_path / 'pid'}"
    worker = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.rewards.worker", f"{user_file}:compute_score", "0.5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    assert json.loads(worker.stdout.readline()) == {"ready": True}
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.flush()
    assert worker.wait(timeout=10) == 1
    os.killpg(worker.pid, signal.SIGKILL)  # the process that the function started
    worker.communicate()


def test_workers_start_together(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(1)\ndef compute_score(*a):\n    return 1.0\n")
    start = time.monotonic()
    pool = WorkerPool(f"{path}:compute_score", 4, 1.0)
    assert time.monotonic() - start < 3.5
    pool.close()


def test_a_worker_that_dies_while_loading_is_reported(tmp_path):
    path = tmp_path / "dies.py"
    path.write_text("import os\nos._exit(5)\n")
    with pytest.raises(ValueError, match="dies.py:f'.*ended with status 5 while loading"):
        RewardManager(RewardConfig(function=f"{path}:f"))


def test_built_in_verifiers_start_no_process_before_a_row_needs_one():
    with RewardManager(RewardConfig(function="auto")) as manager:
        (result,) = manager.score(requests("x"))
        assert result.score == 1.0 and manager._pool is None


def test_one_warning_for_each_kind_of_failure(user_file, caplog):
    with managed(user_file) as manager:
        manager.score(requests("exit", "score", "exit"))
        manager.score(requests("exit"))
    (message,) = caplog.messages
    assert "failed on 2 of 3 responses (the worker died with status 3)" in message
