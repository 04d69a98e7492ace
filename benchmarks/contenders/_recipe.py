"""The recipe that a job names, made into one that only measures: no evaluation, no files."""

import tempfile
from pathlib import Path
from typing import Any

from megatron_rl.config import RunConfig, load_config
from megatron_rl.launch.models import resolve_model


def load_recipe(job: dict[str, Any]) -> tuple[RunConfig, Path]:
    """The configuration and the model's directory.

    Args:
        job: ``recipe`` (path), ``model`` (a bundled model, a directory, or ``tiny``), ``steps`` and
            ``overrides``.
    """
    model = job["model"]
    if model == "tiny":
        from checkpoints_tools.tiny import write_tiny_model

        directory = Path(tempfile.mkdtemp(prefix="megatron_rl_benchmark_")) / "tiny"
        model = str(write_tiny_model(directory))
    overrides = [
        f"model.path={model}",
        "data.val=[]",
        "data.shuffle=false",
        "rollout.ignore_eos=true",
        "rollout.stop=[]",
        f"trainer.total_steps={job['steps']}",
        *job["overrides"],
    ]
    config = load_config(Path(job["recipe"]), overrides)
    return config, resolve_model(config.model.path)
