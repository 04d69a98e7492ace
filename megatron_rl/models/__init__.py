"""Model families as pure description: what a Hugging Face config means, where its weights go.

`model_spec` turns a Hugging Face config into a neutral `ModelSpec`, from which the policy builds
the Megatron model. `parameter_map` pairs each Megatron parameter with its Hugging Face tensors;
weight sync and the checkpoint tools both use it: there is one account of names and layouts.

Nothing here imports Megatron, transformers or vLLM, and nothing touches a file.
"""

from megatron_rl.models.hf_config import eos_token_ids, model_spec
from megatron_rl.models.linears import linear_plan, linear_shapes
from megatron_rl.models.mapping import ParameterMap, parameter_map
from megatron_rl.models.registry import families, family_of
from megatron_rl.models.spec import ModelSpec, MoESpec, RopeSpec

__all__ = [
    "ModelSpec",
    "MoESpec",
    "ParameterMap",
    "RopeSpec",
    "eos_token_ids",
    "families",
    "family_of",
    "linear_plan",
    "linear_shapes",
    "model_spec",
    "parameter_map",
]
