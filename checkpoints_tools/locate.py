"""Finds the checkpoint that a user means, and the model config that belongs to it.

Three kinds of directory are accepted: what `import` writes (it has its own `config.json`), a
checkpoint of a training run (`RUN/checkpoints/global_step_N`, whose model is named in
`RUN/config.yaml`), and a plain Megatron-LM directory (`iter_0000010/` or `release/` beside
`latest_checkpointed_iteration.txt`), whose config the user gives. The last may be in Megatron's
older format, with a file a rank.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from checkpoints_tools.hf import read_json
from checkpoints_tools.per_rank import PerRankSource, is_per_rank
from checkpoints_tools.torch_dist import MegatronSource, is_torch_dist
from checkpoints_tools.torch_dist.directory import MANIFEST

LATEST = "latest_checkpointed_iteration.txt"


def open_checkpoint(path: Path, hf_config: Path | None = None) -> MegatronSource | PerRankSource:
    """Opens a Megatron checkpoint as a source of Hugging Face tensors.

    Args:
        path: One of the kinds of directory above, or a directory of them with a tracker file.
        hf_config: Directory with the model's `config.json` (and tokenizer), or the file itself;
            found when None.

    Raises:
        ValueError: There is no checkpoint, it is damaged or of another format, its config cannot
            be found, or the config is of another model.
    """
    directory = _resolve(Path(path))
    check_files(directory)
    home = _config_directory(directory, hf_config)
    kind = MegatronSource if is_torch_dist(directory) else PerRankSource
    return kind(directory, read_json(home / "config.json"), asset_directory=home)


def _resolve(path: Path) -> Path:
    """The directory with the data, from one that may only point to it."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with a Megatron checkpoint.")
    if _is_checkpoint(path):
        return path
    tracker = path / LATEST
    if tracker.is_file():
        said = tracker.read_text().strip()
        names = ["release"] if said == "release" else []
        if said.isdecimal():
            names = [f"iter_{int(said):07d}", f"global_step_{int(said)}"]
        for name in names:
            if _is_checkpoint(path / name):
                return path / name
        raise ValueError(
            f"{tracker} says {said!r}, and {path} has no checkpoint "
            f"{' or '.join(names) or 'of that name'}; name the directory that you want."
        )
    raise ValueError(
        f"{path} has no Megatron checkpoint: none of .metadata, mp_rank_* and {LATEST} is there."
    )


def _is_checkpoint(path: Path) -> bool:
    return is_torch_dist(path) or is_per_rank(path)


def check_files(directory: Path) -> None:
    """Compares a checkpoint with its manifest, if it has one.

    Raises:
        ValueError: The manifest is damaged, or a file that it lists is missing or has another
            size.
    """
    manifest = directory / MANIFEST
    if not manifest.is_file():
        return
    files = read_json(manifest).get("files")
    if not isinstance(files, dict):
        raise ValueError(f"{manifest} lists no files; copy the checkpoint again.")
    for name, entry in files.items():
        file = directory / name
        size = entry["size"] if isinstance(entry, dict) else entry
        actual = file.stat().st_size if file.is_file() else 0
        if actual != size:
            raise ValueError(
                f"{file} has {actual} bytes instead of {size}; copy the checkpoint again."
            )


def _config_directory(directory: Path, given: Path | None) -> Path:
    if given is not None:
        home = given.parent if given.name == "config.json" else given
        if not (home / "config.json").is_file():
            raise ValueError(f"{home} has no config.json; name a Hugging Face model directory.")
        return home
    if (directory / "config.json").is_file():
        return directory
    run = directory.parent.parent / "config.yaml"
    if not run.is_file():
        raise ValueError(
            f"{directory} does not say of which model it is; give the directory of its Hugging "
            "Face config with --hf-config."
        )
    home = Path(_model_path(run))
    if not (home / "config.json").is_file():
        raise ValueError(
            f"{run} names the model {str(home)!r}, which has no config.json; give the directory of "
            "its Hugging Face config with --hf-config."
        )
    return home


def _model_path(run: Path) -> str:
    try:
        content: Any = yaml.safe_load(run.read_text())
        path = content["model"]["path"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run} does not name a model.path ({error}); give --hf-config."
        ) from error
    if not isinstance(path, str):
        raise ValueError(f"{run} has model.path={json.dumps(path)}; give --hf-config.")
    return path
