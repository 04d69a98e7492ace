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


@pytest.mark.slow
def test_emulated_cuda_path(te_package):
    paths = [str(ROOT), str(te_package), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | flow_environment(resolve_flow("fp8"))
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(Path(__file__).with_name("te_emulation.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=environment,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
