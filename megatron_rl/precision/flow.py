"""The precision flow: one object that fixes every numeric format of training and rollout.

In RL the rollout engine samples from a policy and the trainer differentiates it. Where the two
round differently, the run is off-policy without anybody having asked for it. A
:class:`PrecisionFlow` therefore names, once, the format of every *role* (operands of the products,
norms, attention, logits, master weights, ...), and everything downstream - Megatron's dtypes and
linear layers, vLLM's configuration, the wire format of weight sync, a checkpoint's metadata - is
derived from it and from nothing else.

This module imports no torch, so a flow can be printed and checked on a login node.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_rl.precision.formats import BlockFormat, MXFormat

DType = Literal["float32", "bfloat16", "float16"]
Format = DType | BlockFormat | MXFormat

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LARGEST_SCALE = 2.0**127
"""The largest power of two in FP32, which holds the loss scale."""
SHAREABLE_OPERATORS = ("norm", "rope", "attention")
BETWEEN_PRODUCTS = (
    "attention",
    "kv_cache",
    "residual_add",
    "norm",
    "rope",
    "activation_function",
    "embedding",
)
"""Roles that share one dtype: neither engine can hold them apart."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling of an FP16 flow (arXiv 1710.03740; the values of arXiv 2510.26788)."""

    initial: float = 32768.0
    """Scale of the first step."""
    growth_interval_steps: int = 400
    """Steps without overflow after which the scale doubles."""
    hysteresis: int = 1
    """The overflow, counted from the last growth, that first lowers the scale; so does each later
    one."""
    backoff: float = 0.5
    """Factor of the scale after an overflow."""
    floor: float = 1.0
    """Smallest scale."""
    max_steps_at_floor: int = 10
    """Overflows in a row with the scale at its floor after which the run ends: the policy itself
    has left the finite numbers."""

    def __post_init__(self) -> None:
        """Refuses what is no scale.

        Raises:
            ValueError: A field is no number, or outside its range.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = (int,) if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, wanted):
                kind = "an integer" if field.type is int else "a number"
                raise ValueError(f"precision.flow.loss_scale.{field.name}={value!r} must be {kind}")
        for name, valid, expected in (
            ("floor", 0 < self.floor < math.inf, "above 0 and finite"),
            (
                "initial",
                self.floor <= self.initial <= LARGEST_SCALE,
                f"between the floor {self.floor:g} and 2^127",
            ),
            ("backoff", 0 < self.backoff < 1, "above 0 and below 1"),
            ("growth_interval_steps", self.growth_interval_steps >= 1, "1 or more"),
            ("hysteresis", self.hysteresis >= 1, "1 or more"),
            ("max_steps_at_floor", self.max_steps_at_floor >= 1, "1 or more"),
        ):
            if not valid:
                raise ValueError(
                    f"precision.flow.loss_scale.{name}={getattr(self, name):g} must be {expected}"
                )


@dataclass(frozen=True, kw_only=True)
class PrecisionFlow:
    """Formats of every role of a run; training and rollout share one value a role.

    The roles between the products (norms, RoPE, residual add, activation function) are listed apart
    because each is a place where two engines may round differently although their products agree.
    """

    name: str
    """The name a configuration refers to it by."""
    linear_weight: Format
    """Weights of the linear layers, in the forward and data-gradient products."""
    linear_input: Format
    """Inputs of the linear layers; the weight gradient uses the same format along the tokens."""
    output_gradient: Format
    """Output gradients of the linear layers, in both backward products."""
    rollout_linear_weight: Format | None = None
    """What rollout multiplies with instead of ``linear_weight``; None: the same."""
    rollout_linear_input: Format | None = None
    """Rollout's inputs instead of ``linear_input``; None: the same."""
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
    exempt_first_layers: int = 0
    """Leading layers whose linears stay in the compute dtype."""
    exempt_last_layers: int = 0
    """Trailing layers whose linears do."""
    exempt_modules: tuple[str, ...] = ()
    """Patterns over Hugging Face module names of further linears that do."""
    loss_scale: LossScale | None = None
    """Loss scaling; FP16 only."""
    shared_operators: tuple[str, ...] = ()
    """Operators between the products whose bits training and rollout share, where the platform
    can: of ``norm``, ``rope`` and ``attention``."""

    def __post_init__(self) -> None:
        """Refuses what no pair of engines computes."""
        others = {getattr(self, role) for role in BETWEEN_PRODUCTS}
        if len(others) > 1:
            listing = ", ".join(f"{role}={getattr(self, role)}" for role in BETWEEN_PRODUCTS)
            raise ValueError(
                f"flow {self.name!r} mixes dtypes between the products ({listing}); neither "
                "Megatron nor vLLM can hold them apart, so give them one"
            )
        if self.lm_head not in ("float32", self.compute_dtype):
            raise ValueError(
                f"flow {self.name!r}: lm_head={self.lm_head!r} is neither the compute dtype "
                f"{self.compute_dtype!r} nor 'float32'; choose one of the two"
            )
        for role in ("logits", "master_weight", "gradient_reduction"):
            if getattr(self, role) != "float32":
                raise ValueError(
                    f"flow {self.name!r}: {role}={getattr(self, role)!r} must be 'float32'"
                )
        if self.loss_scale is not None and self.compute_dtype != "float16":
            raise ValueError(
                f"flow {self.name!r} has a loss scale and computes in {self.compute_dtype}; only "
                "float16 needs one, remove it"
            )
        if self.loss_scale is None and self.compute_dtype == "float16":
            raise ValueError(
                f"flow {self.name!r} computes in float16 without a loss scale, so that small "
                "gradients would vanish; derive it from `base: fp16`, or add loss_scale: {}"
            )
        for role in ("linear_weight", "linear_input", "output_gradient"):
            value = getattr(self, role)
            if isinstance(value, str) and value != self.compute_dtype:
                raise ValueError(
                    f"flow {self.name!r}: {role}={value!r} is neither quantised nor the compute "
                    f"dtype {self.compute_dtype!r}"
                )

    @property
    def compute_dtype(self) -> DType:
        """The dtype of parameters and activations, in training and in rollout alike."""
        return self.residual_add

    @property
    def rollout_weight(self) -> Format:
        """What rollout's linears multiply with."""
        return self.rollout_linear_weight or self.linear_weight

    @property
    def rollout_input(self) -> Format:
        """What rollout's linears take as input."""
        return self.rollout_linear_input or self.linear_input

    @property
    def trains_quantised(self) -> bool:
        """Whether training multiplies quantised weights."""
        return not isinstance(self.linear_weight, str)

    @property
    def serves_quantised(self) -> bool:
        """Whether rollout multiplies quantised weights."""
        return not isinstance(self.rollout_weight, str)

    @property
    def formats_differ(self) -> bool:
        """Whether rollout's linears compute in other formats than training's forward pass."""
        return self.rollout_weight != self.linear_weight or self.rollout_input != self.linear_input

    def short_str(self) -> str:
        """A one-line summary, such as ``bf16 (compute bf16, logits fp32, master fp32)``."""
        parts = [f"compute {SHORT[self.compute_dtype]}"]
        if self.trains_quantised:
            parts.append(
                f"linears {format_str(self.linear_weight)} x {format_str(self.linear_input)}, "
                f"gradients {format_str(self.output_gradient)}"
            )
        if self.formats_differ:
            parts.append(
                f"ROLLOUT {format_str(self.rollout_weight)} x {format_str(self.rollout_input)}"
            )
        if self.lm_head != self.compute_dtype:
            parts.append(f"lm_head {SHORT[self.lm_head]}")
        parts += [
            f"logits {SHORT[self.logits]}",
            f"master {SHORT[self.master_weight]}",
            f"gradient reduction {SHORT[self.gradient_reduction]}",
        ]
        return f"{self.name} ({', '.join(parts)})"

    def describe(self) -> str:
        """Every role and its format, one a line."""
        return "\n".join(
            f"{field.name:22s} {role_str(getattr(self, field.name))}" for field in fields(self)
        )


def format_str(value: Format) -> str:
    """A format in a word or two: ``bf16``, ``e4m3 1x128 pow2``."""
    return SHORT[value] if isinstance(value, str) else value.short_str()


def role_str(value: Any) -> str:
    """The value of any role in a few words; ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, BlockFormat | MXFormat):
        return value.short_str()
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    if isinstance(value, LossScale):
        return ", ".join(f"{f.name} {getattr(value, f.name):g}" for f in fields(value))
    return str(SHORT.get(value, value))
