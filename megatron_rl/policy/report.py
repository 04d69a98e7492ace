"""What the policy's live modules compute, for the audit (:mod:`megatron_rl.precision.audit`)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_rl.models import ParameterMap
from megatron_rl.policy.attention import GroupAttention
from megatron_rl.policy.fp8_linear import BlockScaledLinear
from megatron_rl.policy.norm import RMSNorm
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.policy.weights import global_name, layer_offset
from megatron_rl.precision import format_str
from megatron_rl.precision.audit import ModelReport, Operand
from megatron_rl.precision.digests import canonical, digest
from megatron_rl.precision.wire import SCALE_SUFFIX


def describe_model(
    model: torch.nn.Module,
    parameters: ParameterMap,
    layout: ParallelLayout,
    served: Iterable[tuple[str, torch.Tensor]],
) -> ModelReport:
    """Reads formats, operands and operators from live modules.

    A collective over the policy's ranks.

    Args:
        model: Bare Megatron model of this stage.
        parameters: The family's map.
        layout: This rank's place.
        served: (Hugging Face name, tensor) of the whole policy as it is served.
    """
    digests = _digests(served)
    if parameters.spec.tie_word_embeddings:
        digests["lm_head"] = digests["model.embed_tokens"]
    linears = {}
    for name, (weight, inputs, kernel, fault) in _all_stages(_formats(model), layout).items():
        for hf_name in parameters.entry(f"{name}.weight").hf_names:
            module = "lm_head" if name == "output_layer" else hf_name.removesuffix(".weight")
            linears[module] = Operand(
                weight=weight, input=inputs, kernel=kernel, digest=digests[module], fault=fault
            )
    return ModelReport(linears=linears, shared_operators=_operators(model))


Formats = tuple[str, str, str, str | None]
"""Of weight and input, the kernel, and what is wrong with the operand."""


def _formats(model: torch.nn.Module) -> dict[str, Formats]:
    """Formats of this stage's linear layers, by global name."""
    offset = layer_offset(model)
    found: dict[str, Formats] = {}
    for name, module in model.named_modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | BlockScaledLinear):
            continue
        if name == "output_layer":
            weight = model.head()[0]  # type: ignore[operator]
        else:
            weight = module.weight
        kernel = type(module).__name__
        if isinstance(module, BlockScaledLinear):
            formats, fault = module.formats, module.operand_fault()
            entry = (formats.weight.short_str(), formats.input.short_str(), kernel, fault)
        else:
            dtype = format_str(str(weight.dtype).removeprefix("torch."))  # type: ignore[arg-type]
            entry = (dtype, dtype, kernel, None)
        found[global_name(name, offset)] = entry
    return found


def _all_stages(ours: dict[str, Formats], layout: ParallelLayout) -> dict[str, Formats]:
    if layout.pp_size == 1:
        return ours
    stages: list[dict[str, Formats]] = [{} for _ in range(layout.pp_size)]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_gather_object(stages, ours, group=group)
    return {name: formats for stage in stages for name, formats in stage.items()}


def _digests(served: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest of each served operand, by Hugging Face module; codes come with their scales."""
    found: dict[str, str] = {}
    codes: torch.Tensor | None = None
    for name, tensor in served:
        module = name.removesuffix(SCALE_SUFFIX).removesuffix(".weight")
        if name.endswith(SCALE_SUFFIX):
            assert codes is not None
            found[module] = digest(codes, tensor)
        elif name.endswith(".weight"):
            codes = tensor
            if tensor.dtype.itemsize > 1:
                found[module] = digest(canonical(tensor))
    return found


def _operators(model: torch.nn.Module) -> tuple[str, ...]:
    """Shared operators of this stage; in norm and RoPE it is rollout that follows."""
    attention = [m for m in model.modules() if isinstance(m, GroupAttention)]
    found = ["rope"]
    if any(isinstance(m, RMSNorm) for m in model.modules()):
        found.append("norm")
    if attention and all(m.rollout_kernel for m in attention):
        found.append("attention")
    return tuple(found)
