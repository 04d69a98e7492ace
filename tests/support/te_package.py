"""Transformer Engine's Python package, for the tests that emulate it in processes of their own."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="session")
def te_environment(te_package: Path) -> dict[str, str]:
    """Variables with which a process finds the package, and runs the flow `fp8`."""
    from megatron_rl.precision import resolve_flow
    from megatron_rl.precision.environment import flow_environment

    paths = [str(ROOT), str(ROOT / "tests"), str(te_package), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return flow_environment(resolve_flow("fp8")) | variables
