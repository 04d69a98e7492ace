"""Start-up: environment before imports, a quiet console, model lookup, resume and disk checks."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from megatron_rl.launch.environment import export_environment, run_environment
from megatron_rl.launch.models import cache_directory, resolve_model
from megatron_rl.precision import resolve_flow

QUIET = """
import os, sys
from pathlib import Path
from megatron_rl.launch.quiet import open_console, quiet
console = open_console()
print("before")
try:
    with quiet(Path(sys.argv[1])):
        print("python noise")
        os.write(1, b"c noise\\n")
        os.write(2, b"c error noise\\n")
        print("a line of the run", file=console)
        raise KeyError("inside")
except KeyError:
    print("after")
"""


def test_noise_goes_to_the_file_and_the_console_stays(tmp_path):
    log = tmp_path / "logs" / "noise.log"
    result = subprocess.run(
        [sys.executable, "-c", QUIET, str(log)], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["before", "a line of the run", "after"]
    assert result.stderr == ""
    assert sorted(log.read_text().splitlines()) == ["c error noise", "c noise", "python noise"]


def test_the_environment_is_set_before_heavy_imports(monkeypatch):
    monkeypatch.setattr(sys, "modules", {"torch": None})
    with pytest.raises(RuntimeError, match="torch was imported before"):
        export_environment({})
    monkeypatch.setattr(sys, "modules", {})
    export_environment({"MEGATRON_RL_TEST": "1"})
    assert os.environ.pop("MEGATRON_RL_TEST") == "1"


def test_the_callers_thread_count_and_log_level_win(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    variables = run_environment(resolve_flow("bf16"))
    assert variables["OMP_NUM_THREADS"] == "7" and variables["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "10000")
    assert run_environment(resolve_flow("bf16"))["OMP_NUM_THREADS"] == "1"


def test_model_lookup(tmp_path, tiny_model_dir, monkeypatch):
    assert resolve_model(str(tiny_model_dir("llama"))) == tiny_model_dir("llama")
    with pytest.raises(ValueError, match="neither a Hugging Face directory.*smollm2"):
        resolve_model(str(tmp_path))
    monkeypatch.setenv("MEGATRON_RL_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path


def config_for(tmp_path, **trainer):
    from megatron_rl.config import validate

    source = {"name": "a", "kind": "file", "path": "p"}
    return validate(
        {
            "output_dir": str(tmp_path),
            "model": {"path": "m"},
            "data": {"train": [source]},
            "trainer": trainer,
        }
    )


def test_which_checkpoint_a_run_continues_from(tmp_path):
    from megatron_rl.trainer.run import find_resume
    from megatron_rl.trainer.run_directory import run_directory

    auto = config_for(tmp_path)
    run_dir = run_directory(auto)
    assert find_resume(auto, run_dir) is None
    for step in (2, 10):
        directory = run_dir / "checkpoints" / f"global_step_{step}"
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(json.dumps({"files": {}}))
    (run_dir / "checkpoints" / "global_step_11").mkdir()  # incomplete
    assert find_resume(auto, run_dir).name == "global_step_10"
    with pytest.raises(ValueError, match="would write over them"):
        find_resume(config_for(tmp_path, resume_mode="disable"), run_dir)
    explicit = config_for(
        tmp_path, resume_mode="path", resume_path=str(run_dir / "checkpoints" / "global_step_2")
    )
    assert find_resume(explicit, run_dir).name == "global_step_2"
    incomplete = str(run_dir / "checkpoints" / "global_step_11")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        find_resume(config_for(tmp_path, resume_mode="path", resume_path=incomplete), run_dir)


def test_a_write_that_cannot_fit_is_not_started(tmp_path, monkeypatch):
    from megatron_rl.trainer.run_directory import check_free_space

    check_free_space(tmp_path, 1, "a checkpoint")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 2**30)
    )
    with pytest.raises(OSError, match=r"a checkpoint in .* needs 2\.0 GiB and 1\.0 GiB are free"):
        check_free_space(tmp_path, 2 * 2**30, "a checkpoint")


def test_a_machine_with_a_driver_gets_the_variables_of_the_flow(monkeypatch, tmp_path):
    monkeypatch.setattr("megatron_rl.launch.environment.NVIDIA_DRIVER", tmp_path)
    assert run_environment(resolve_flow("fp8"))["VLLM_USE_DEEP_GEMM_E8M0"] == "1"
    monkeypatch.setattr("megatron_rl.launch.environment.NVIDIA_DRIVER", tmp_path / "none")
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in run_environment(resolve_flow("fp8"))
