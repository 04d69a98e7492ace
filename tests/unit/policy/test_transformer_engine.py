"""Runs `te_emulation.py`, the emulation of the CUDA path, in a process with TE's Python package.

A process of its own, because megatron-core decides at import whether Transformer Engine is there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launch import run_distributed

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_emulated_cuda_path(te_environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(Path(__file__).with_name("te_emulation.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=os.environ | te_environment,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", ["false", "true"], ids=["tp2", "tp2_sp"])
def test_emulated_cuda_path_at_tp_2(te_environment, tiny_model_dir, sequence_parallel):
    # 768 / 2 / 128 = 3 columns of scales a rank, which TE rounds up to 4 on each.
    sizes = {"hidden_size": 256, "head_dim": 128, "ffn_hidden_size": 768, "num_layers": 1}
    run_distributed(
        Path(__file__).with_name("te_layout.py"),
        2,
        [str(tiny_model_dir("qwen3", **sizes)), sequence_parallel],
        timeout_s=600,
        env=te_environment,
    )
