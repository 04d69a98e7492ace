"""Runs `te_emulation.py`, the emulation of the CUDA path, in a process with TE's Python package.

A process of its own, because megatron-core decides at import whether Transformer Engine is there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.precision import resolve_flow
from megatron_rl.precision.environment import flow_environment
from support.launch import run_distributed

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "requirements" / "te-emulation.lock"


@pytest.fixture(scope="session")
def te_package(pytestconfig) -> Path:
    """A folder with the locked `transformer_engine`; made once, outside the environment."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    folder = pytestconfig.cache.mkdir("transformer_engine") / digest
    if not folder.exists():
        unfinished = folder.with_name(f"{digest}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", unfinished]
        result = subprocess.run(
            [*map(str, command), "-r", str(LOCK)], capture_output=True, text=True, timeout=300
        )
        if result.returncode:
            shutil.rmtree(unfinished, ignore_errors=True)
            pytest.skip(f"{LOCK.name} cannot be installed: {result.stderr.strip()[-300:]}")
        unfinished.rename(folder)
    return folder


def environment(te_package):
    paths = [str(ROOT), str(ROOT / "tests"), str(te_package), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return flow_environment(resolve_flow("fp8")) | variables


@pytest.mark.slow
def test_emulated_cuda_path(te_package):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(Path(__file__).with_name("te_emulation.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | environment(te_package),
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", ["false", "true"], ids=["tp2", "tp2_sp"])
def test_emulated_cuda_path_at_tp_2(te_package, tiny_model_dir, sequence_parallel):
    # 768 / 2 / 128 = 3 columns of scales a rank, which TE rounds up to 4 on each.
    sizes = {"hidden_size": 256, "head_dim": 128, "ffn_hidden_size": 768, "num_layers": 1}
    run_distributed(
        Path(__file__).with_name("te_layout.py"),
        2,
        [str(tiny_model_dir("qwen3", **sizes)), sequence_parallel],
        timeout_s=600,
        env=environment(te_package),
    )
