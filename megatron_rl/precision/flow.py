"""The precision flow: one object that says in which format every role of a run computes.

Reinforcement learning samples from one engine and differentiates another. When the two round
differently, the run is off-policy without anybody having asked for it. A :class:`PrecisionFlow`
therefore names, once, the format of every *role* (linear weights and inputs, norms, attention,
logits, master weights, ...), and everything downstream - Megatron's dtypes, vLLM's configuration,
the wire format of weight sync, a checkpoint's metadata - is derived from it and from nothing else.

This module imports no torch, so a flow can be printed and checked on a login node.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]

SHAREABLE_OPERATORS = ("norm", "rope", "attention")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class PrecisionFlow:
    """Formats of every role of a run; training and rollout share one value a role.

    The roles between the products (norms, RoPE, residual add, activation function) are listed apart
    because each is a place where two engines may round differently although their products agree.
    """

    name: str
    """The name a configuration refers to it by."""
    linear_weight: DType
    """Weights of the linear layers, as multiplied with."""
    linear_input: DType
    """Inputs of the linear layers."""
    output_gradient: DType
    """Gradients that flow between operators in the backward pass."""
    attention: DType
    """Queries, keys and values; softmax and accumulation are FP32 inside the kernel."""
    kv_cache: DType
    """Keys and values that rollout keeps."""
    residual_add: DType
    """The residual stream after each add."""
    norm: DType
    """Norm inputs and outputs; the statistics are FP32."""
    rope: DType
    """Result of the rotary embedding."""
    activation_function: DType
    """Result of SiLU(gate) * up."""
    embedding: DType
    """Token embedding."""
    lm_head: DType
    """Weight and input of the output layer."""
    logits: DType = "float32"
    """Log-softmax and log-probs."""
    master_weight: DType = "float32"
    """The optimizer's copy of the weights."""
    gradient_reduction: DType = "float32"
    """Accumulation over micro-batches and reduction over ranks."""
    shared_operators: tuple[str, ...] = ()
    """Operators between the products whose bits training and rollout share, where the platform
    can: of ``norm``, ``rope`` and ``attention``."""

    @property
    def compute_dtype(self) -> DType:
        """The dtype of parameters and activations, in training and in rollout alike."""
        return self.linear_weight

    def short_str(self) -> str:
        """A one-line summary, such as ``bf16 (compute bf16, logits fp32, master fp32)``."""
        return (
            f"{self.name} (compute {SHORT[self.compute_dtype]}, logits {SHORT[self.logits]}, "
            f"master {SHORT[self.master_weight]}, gradient reduction "
            f"{SHORT[self.gradient_reduction]})"
        )

    def describe(self) -> str:
        """Every role and its format, one a line."""
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "\n".join(f"{name:20s} {SHORT.get(value, value)}" for name, value in rows)


def _uniform(name: str, dtype: DType) -> PrecisionFlow:
    return PrecisionFlow(
        name=name,
        linear_weight=dtype,
        linear_input=dtype,
        output_gradient=dtype,
        attention=dtype,
        kv_cache=dtype,
        residual_add=dtype,
        norm=dtype,
        rope=dtype,
        activation_function=dtype,
        embedding=dtype,
        lm_head=dtype,
        shared_operators=() if dtype == "float32" else SHAREABLE_OPERATORS,
    )


_FLOWS: dict[str, Callable[[], PrecisionFlow]] = {
    "bf16": lambda: _uniform("bf16", "bfloat16"),
    "fp32": lambda: _uniform("fp32", "float32"),
}


def flow_names() -> list[str]:
    """Names that :func:`resolve_flow` accepts."""
    return sorted(_FLOWS)


def resolve_flow(name: str) -> PrecisionFlow:
    """Looks a flow up by name.

    Raises:
        ValueError: No flow of that name exists; the message lists those that do.
    """
    if name not in _FLOWS:
        nearest = get_close_matches(name, _FLOWS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "choose one of them"
        raise ValueError(
            f"precision.flow={name!r} is not a flow of this version, which has "
            f"{', '.join(flow_names())}; {hint}"
        )
    return _FLOWS[name]()
