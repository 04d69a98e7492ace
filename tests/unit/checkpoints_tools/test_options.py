"""What the commands share: sizes, and progress for terminals and for log files."""

import argparse
import io

import pytest

from checkpoints_tools.commands.options import add_writing, positive, size_bytes
from checkpoints_tools.progress import Progress, format_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("12B", 12),
        ("5GB", 5 * 10**9),
        ("500mb", 5 * 10**8),
        ("1.5 kB", 1500),
        ("2GiB", 2 * 2**30),
        ("1TB", 10**12),
    ],
)
def test_sizes(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.1B", "-5GB", "5XB", "GB", "5 GB more", "1e9", "inf"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size_bytes(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "two"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        positive(text)


def test_defaults():
    parser = argparse.ArgumentParser()
    add_writing(parser)
    arguments = parser.parse_args([])
    assert (arguments.max_shard_bytes, arguments.workers) == (5 * 10**9, 1)
    assert not (arguments.dry_run or arguments.overwrite or arguments.quiet)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1250000000, "1.25 GB"), (10**18, "1e+03 PB")],
)
def test_bytes_for_people(nbytes, text):
    assert format_bytes(nbytes) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watch(stream, **options):
    """Ten steps of 100 bytes, four seconds each."""
    now = [0.0]
    with Progress("writing m", 1000, stream=stream, clock=lambda: now[0], **options) as progress:
        for _ in range(10):
            now[0] += 4.0
            progress(100)
    return stream.getvalue()


def test_a_log_file_gets_a_line_every_ten_seconds():
    *lines, last = watch(io.StringIO()).splitlines()
    assert lines == [
        "writing m: 300 B of 1 kB (30 %), 28 s left",
        "writing m: 600 B of 1 kB (60 %), 16 s left",
        "writing m: 900 B of 1 kB (90 %), 4 s left",
    ]
    assert last == "writing m: 1 kB in 40.0 s (25 B/s)"


def test_a_terminal_gets_one_line():
    text = watch(Terminal())
    assert text.count("\r") == 11 and text.count("\n") == 1
    assert text.endswith("writing m: 1 kB in 40.0 s (25 B/s)\x1b[K\n")


def test_quiet_and_failed_work_print_no_summary():
    assert watch(io.StringIO(), quiet=True) == ""
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress("writing m", 10, stream=stream):
        raise KeyError
    assert stream.getvalue() == ""
