import contextlib
import errno
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics import MetricsWriter, RunWriteError, read_metrics
from megatron_rl.metrics.files import append_line, atomic_write

PLAIN = LoggingConfig()


def write(run_dir, steps, *, resume_step=None, start_s=0.0):
    """Logs ``{"x": step}`` at one step a second."""
    now = [start_s]
    with MetricsWriter(run_dir, PLAIN, resume_step=resume_step, clock=lambda: now[0]) as writer:
        for step in steps:
            now[0] += 1.0
            writer.log(step, {"x": step})


@contextlib.contextmanager
def file_size_limit(limit_bytes):
    """Makes the kernel refuse to grow files: short writes, then errors, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_lines_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    with MetricsWriter(tmp_path, PLAIN, resume_step=None) as writer:
        for step in range(1, 4):
            writer.log(step, {"x": 0.5 * step})
            lines = read_metrics(tmp_path)
            assert [(line.step, line.metrics) for line in lines] == [
                (earlier, {"x": 0.5 * earlier}) for earlier in range(1, step + 1)
            ]


def test_one_line_is_one_write(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, PLAIN, resume_step=None) as writer:
        sizes = []
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(len(data)) or real(fd, data))
        writer.log(1, {f"key/{number}": number / 3 for number in range(500)})
        monkeypatch.undo()
    assert sizes == [(tmp_path / "metrics.jsonl").stat().st_size]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.dictionaries(st.text(max_size=8), st.floats(), min_size=1, max_size=4),
        ),
        max_size=5,
    )
)
def test_what_is_logged_is_read_back_and_is_strict_json(tmp_path_factory, logged):
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsWriter(run_dir, PLAIN, resume_step=None) as writer:
        for step, metrics in logged:
            writer.log(step, metrics)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    read = read_metrics(run_dir)
    assert [line.step for line in read] == [step for step, _ in logged]
    for line, (_, metrics) in zip(read, logged, strict=True):
        assert line.metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            assert line.metrics[key] == value or (
                math.isnan(line.metrics[key]) and math.isnan(value)
            )


def test_scalars_of_other_libraries_are_taken_and_others_refused_whole(tmp_path):
    with MetricsWriter(tmp_path, PLAIN, resume_step=None) as writer:
        writer.log(1, {"tensor": torch.tensor(0.25), "int": 3})
        writer.log(2, {})
        with pytest.raises(ValueError, match="metric 'bad' is .* not a number"):
            writer.log(3, {"good": 1.0, "bad": "much"})
    assert [line.metrics for line in read_metrics(tmp_path)] == [{"tensor": 0.25, "int": 3.0}]


@pytest.mark.parametrize("resume_step", [0, 2, 3, 9])
def test_a_resumed_run_reads_like_an_uninterrupted_one(tmp_path, resume_step):
    write(tmp_path / "whole", range(10))
    write(tmp_path / "resumed", range(6))
    write(tmp_path / "resumed", range(resume_step + 1, 10), resume_step=resume_step, start_s=500.0)
    whole, resumed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "resumed")
    if resume_step <= 5:
        assert resumed == whole  # times too: the pause does not count
    else:
        assert resumed == whole[:6]


@pytest.mark.parametrize(
    "tail", [b'{"step": 4, "time_s": 1.0, "met', b"\x00\x00\x00", b"7\n", b"{}\n"]
)
def test_a_damaged_last_line_costs_only_itself(tmp_path, tail):
    write(tmp_path, range(4))
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + tail)
    assert [line.step for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    write(tmp_path, [3], resume_step=2)
    assert [line.step for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert path.read_bytes().startswith(b"".join(good.splitlines(keepends=True)[:3]))


def test_a_fresh_start_sets_an_earlier_run_aside(tmp_path):
    for _ in range(3):
        write(tmp_path, [1, 2])
    assert len(read_metrics(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "metrics.jsonl.previous-1",
        "metrics.jsonl.previous-2",
    ]


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("limit_bytes", range(200, 320, 7))
def test_a_full_disk_loses_nothing_that_was_written(tmp_path, limit_bytes):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, PLAIN, resume_step=None) as writer:
        with pytest.raises(RunWriteError) as caught, file_size_limit(limit_bytes):
            for step in range(100):
                written = path.read_bytes()
                writer.log(step, {"loss": 0.123456})
        assert path.read_bytes() == written
        assert caught.value.errno == errno.EFBIG
        writer.log(step, {"loss": 0.5})  # space again: the writer goes on
    assert [line.step for line in read_metrics(tmp_path)] == list(range(step + 1))


def test_the_error_of_a_full_disk_tells_all(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsWriter(tmp_path, PLAIN, resume_step=None) as writer:
        writer.log(6, {"x": 1.0})
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError) as caught:
            writer.log(7, {"x": 1.0})
        monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    message = str(caught.value)
    assert message.startswith(f"cannot write {tmp_path / 'metrics.jsonl'}: No space left on device")
    assert "GiB free there" in message
    assert "All metrics before step 7 and every complete checkpoint are safe." in message
    assert [line.step for line in read_metrics(tmp_path)] == [6]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_append_to_a_device_that_is_full():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            append_line(descriptor, b"{}\n")
    finally:
        os.close(descriptor)


def test_atomic_write_keeps_the_old_file_and_leaves_no_rest(tmp_path):
    path = tmp_path / "report.html"
    atomic_write(path, "old")
    with pytest.raises(RunWriteError, match="an older one here is kept"), file_size_limit(100):
        atomic_write(path, "x" * 1000)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_run_dir_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunWriteError, match="cannot write .*metrics.jsonl"):
        MetricsWriter(tmp_path / "run", PLAIN, resume_step=None)


def test_nothing_heavy_is_imported_without_need(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "import megatron_rl.report\n"
        "from megatron_rl.metrics import MetricsWriter\n"
        "from megatron_rl.config import LoggingConfig\n"
        f"MetricsWriter(Path({str(tmp_path)!r}), LoggingConfig(), resume_step=None).close()\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'wandb', 'tensorboard', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"
