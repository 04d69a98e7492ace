"""Opens whatever a user names: a Hugging Face directory or a Megatron checkpoint."""

from pathlib import Path

from checkpoints_tools.hf import HFReader
from checkpoints_tools.source import TensorSource


def open_source(path: Path, hf_config: Path | None = None) -> TensorSource:
    """Opens a model, without reading a tensor.

    Args:
        path: Hugging Face directory, or any directory that `locate.open_checkpoint` takes.
        hf_config: Directory with the `config.json` of a Megatron checkpoint that has none.

    Raises:
        ValueError: It is neither, or it is damaged.
    """
    path = Path(path)
    if is_hugging_face(path):
        if hf_config is not None:
            raise ValueError(
                f"{path} is a Hugging Face directory and has its own config.json; leave out "
                "--hf-config."
            )
        return HFReader(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with a model.")
    from checkpoints_tools.locate import open_checkpoint

    return open_checkpoint(path, hf_config)


def is_hugging_face(path: Path) -> bool:
    """Whether a directory has weights in one of Hugging Face's formats."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    return any(next(path.glob(pattern), None) for pattern in patterns)


def refuse_quantised(source: TensorSource, what: str) -> None:
    """Checks that a source has values, and not codes.

    Raises:
        ValueError: It is quantised; `what` names the command that was asked for.
    """
    if "quantization_config" in source.config:
        method = source.config["quantization_config"].get("quant_method")
        raise ValueError(
            f"{source.path} is quantised already (quant_method {method!r}), and nothing is "
            f"quantised twice; `{what}` takes BF16, FP16 or FP32 weights: run `dequantize` first."
        )
