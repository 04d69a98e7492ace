"""Finds the model that a run names: a directory, or a bundled one, imported on first use."""

import os
from pathlib import Path

BUNDLED = ("smollm2-135m-instruct",)


def cache_directory() -> Path:
    """Where imported models are kept; ``MEGATRON_RL_CACHE`` moves it."""
    default = Path.home() / ".cache" / "megatron_rl"
    return Path(os.environ.get("MEGATRON_RL_CACHE", default))


def resolve_model(name: str) -> Path:
    """The Hugging Face directory of a model.

    Raises:
        ValueError: It is neither a directory nor a bundled model.
    """
    if name in BUNDLED:
        from checkpoints_tools.gguf import import_smollm2

        return import_smollm2(cache_directory() / "models" / name)
    path = Path(name)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model.path={name!r} is neither a Hugging Face directory (with a config.json) nor a "
            f"bundled model ({', '.join(BUNDLED)}); correct it"
        )
    return path
