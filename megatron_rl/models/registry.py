"""The supported families, and which of them a Hugging Face config belongs to.

An explicit list: adding a family is one file and one line here. There is no registration at
import, and no guessing from tensor names.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.family import Family
from megatron_rl.models.llama import LLAMA
from megatron_rl.models.mistral import MISTRAL
from megatron_rl.models.mixtral import MIXTRAL
from megatron_rl.models.qwen2 import QWEN2
from megatron_rl.models.qwen3 import QWEN3
from megatron_rl.models.qwen3_moe import QWEN3_MOE


def families() -> tuple[Family, ...]:
    """All supported families."""
    return (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)


def family_of(config: Mapping[str, Any]) -> Family:
    """Find the family of a Hugging Face config.

    Args:
        config: Content of `config.json`. `architectures` decides; `model_type` only when a config
            made in memory has no `architectures` yet.

    Returns:
        The family.

    Raises:
        ValueError: The architecture is unknown, ambiguous or missing.
    """
    supported = ", ".join(f.architecture for f in families())
    architectures = config.get("architectures")
    if architectures:
        found = [f for f in families() if [f.architecture] == list(architectures)]
        problem = f"architectures={list(architectures)!r}"
    else:
        found = [f for f in families() if f.name == config.get("model_type")]
        problem = f"no architectures, and model_type={config.get('model_type')!r}"
    if not found:
        raise ValueError(f"The model config has {problem}; supported are {supported}.")
    return found[0]


def family_named(name: str) -> Family:
    """The family of a `ModelSpec.family`."""
    (found,) = (family for family in families() if family.name == name)
    return found
