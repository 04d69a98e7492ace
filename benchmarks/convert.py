"""Conversions against ``cp`` and against loading and saving with ``transformers``.

    python -m benchmarks.convert
    python -m benchmarks.convert --rounds 5 --markdown docs/benchmarks/convert.md

Every contender is a whole process, from its start to the end of ``fsync`` of all that it wrote, and
writes into a directory that is removed afterwards. They take turns, round by round. The source is
read once before the first turn, so it is in the page cache, and what counts is copying, computing
and the disk's writing. ``start-up`` is ``import`` with ``--dry-run``: interpreter, imports and
headers. Peak resident memory includes the pages of the source that the process has mapped; the
kernel may drop those at any time. ``anonymous`` is what it cannot drop, sampled every 5 ms.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks._common import ROOT, machine, markdown_table, write_markdown

MB = 1e6
LARGE = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "head_dim": 128,
    "ffn_hidden_size": 8192,
    "vocab_size": 32_000,
}
TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2])
"""
GENERATE = """
import json, sys, torch
from checkpoints_tools.tiny import write_tiny_model
write_tiny_model(sys.argv[1], "llama", dtype=torch.bfloat16, **json.loads(sys.argv[2]))
"""
FSYNC = """
import os, sys
for folder, _, names in os.walk(sys.argv[2]):
    for name in names:
        handle = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
"""


@dataclass(frozen=True)
class Turn:
    """One run of one contender."""

    seconds: float
    peak_bytes: int
    anonymous_bytes: int


@dataclass(frozen=True)
class Contender:
    """A command, by the directories that it reads and writes."""

    name: str
    argv: Callable[[Path, Path], list[str]]
    reads: str = "hf"
    needs_fsync: bool = False


def tools(*arguments: str) -> Callable[[Path, Path], list[str]]:
    """The command line of a conversion."""

    def argv(source: Path, target: Path) -> list[str]:
        command, *options = arguments
        program = [sys.executable, "-m", "checkpoints_tools.cli"]
        return [*program, command, str(source), str(target), "--quiet", *options]

    return argv


def script(text: str) -> Callable[[Path, Path], list[str]]:
    """A short Python program as a command line."""

    return lambda source, target: [sys.executable, "-c", text, str(source), str(target)]


CP = Contender(
    "cp",
    lambda source, target: ["cp", "-r", "--reflink=never", str(source), str(target)],
    needs_fsync=True,
)
CONTENDERS = (
    CP,
    Contender("transformers", script(TRANSFORMERS), needs_fsync=True),
    Contender("start-up", tools("import", "--dry-run")),
    Contender("import", tools("import")),
    Contender("import --workers 2", tools("import", "--workers", "2")),
    Contender("export", tools("export"), reads="megatron"),
    Contender("export --workers 2", tools("export", "--workers", "2"), reads="megatron"),
    Contender("quantize", tools("quantize")),
    Contender("dequantize", tools("dequantize"), reads="fp8"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="file system to measure; about 10 GB")
    parser.add_argument("--small", type=Path, help="HF directory of the smaller model")
    parser.add_argument("--only-small", action="store_true", help="leave the generated 1 B out")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args(argv)
    parts = []
    with TemporaryDirectory(prefix="benchmark.", dir=arguments.work_dir) as folder:
        for title, source in _models(arguments, Path(folder)):
            parts.append(_compare(title, source, Path(folder), arguments.rounds))
            if source.parent == Path(folder):
                shutil.rmtree(source)
    intro = (
        f"Medians of {arguments.rounds} rounds, source in the page cache, everything written is "
        f"fsynced. {machine()}."
    )
    write_markdown("\n\n".join([intro, *parts]), arguments.markdown)


def _models(arguments: argparse.Namespace, folder: Path):
    if arguments.small:
        yield arguments.small.name, arguments.small
    else:
        source = folder / "SmolLM2-135M"
        _call([sys.executable, "-m", "checkpoints_tools.cli", "import-gguf", str(source)])
        yield "SmolLM2-135M", source
    if not arguments.only_small:
        source = folder / "generated"
        # In a process of its own: a child's peak begins with what its parent held.
        _call([sys.executable, "-c", GENERATE, str(source), json.dumps(LARGE)])
        yield "A generated Llama of 1.1 B parameters", source


def _compare(title: str, source: Path, folder: Path, rounds: int) -> str:
    sources = {"hf": source, "megatron": folder / "megatron", "fp8": folder / "fp8"}
    _call(tools("import")(source, sources["megatron"]))
    contenders = list(CONTENDERS)
    quantised = _call(tools("quantize")(source, sources["fp8"]), check=False) == 0
    if not quantised:  # no layer of whole blocks
        contenders = [c for c in contenders if c.name not in ("quantize", "dequantize")]
    for path in (path for path in sources.values() if path.is_dir()):
        for file in path.rglob("*"):
            if file.is_file():
                _call(["cat", str(file)])
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            turns[contender.name].append(_turn(contender, sources[contender.reads], folder / "out"))
    nbytes = _size(source)
    rows = []
    for contender in contenders:
        own = turns[contender.name]
        ratio = median(turn.seconds / cp.seconds for turn, cp in zip(own, turns["cp"], strict=True))
        net = median(
            (turn.seconds - start.seconds) / cp.seconds
            for turn, start, cp in zip(own, turns["start-up"], turns["cp"], strict=True)
        )
        seconds = median(turn.seconds for turn in own)
        ours = contender.name not in ("cp", "transformers", "start-up")
        rows.append(
            [
                contender.name,
                f"{seconds:.2f}",
                f"{nbytes / MB / seconds:,.0f}" if contender.name != "start-up" else "",
                f"{1 / ratio:.2f}" if contender.name != "start-up" else "",
                f"{1 / net:.2f}" if ours else "",
                f"{max(turn.peak_bytes for turn in own) / MB:,.0f}",
                f"{max(turn.anonymous_bytes for turn in own) / MB:,.0f}",
            ]
        )
    for path in (sources["megatron"], sources["fp8"]):
        shutil.rmtree(path, ignore_errors=True)
    header = ["", "s", "MB/s of BF16", "of cp's", "without start-up", "peak RSS MB", "anonymous MB"]
    note = "" if quantised else " It has no layer of whole 128 x 128 blocks to quantise."
    return f"**{title}**, {nbytes / MB:,.0f} MB.{note}\n\n{markdown_table(header, rows)}"


def _turn(contender: Contender, source: Path, target: Path) -> Turn:
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(
        contender.argv(source, target),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    anonymous = _Sampler(process.pid)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    anonymous.stop()
    if process.returncode:
        raise RuntimeError(f"{contender.name} failed: {said}")
    if contender.needs_fsync:
        _call(script(FSYNC)(source, target))
    seconds = time.perf_counter() - start
    shutil.rmtree(target, ignore_errors=True)
    return Turn(seconds, usage.ru_maxrss * 1024, anonymous.largest)


class _Sampler:
    """Largest anonymous memory of a process, read from /proc until it is stopped."""

    def __init__(self, pid: int) -> None:
        self.largest = 0
        self._status = Path(f"/proc/{pid}/status")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.005):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            for line in lines:
                if line.startswith("RssAnon:"):
                    self.largest = max(self.largest, int(line.split()[1]) * 1024)


def _call(argv: list[str], *, check: bool = True) -> int:
    done = subprocess.run(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr}")
    return done.returncode


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
