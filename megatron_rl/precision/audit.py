"""The audit: do the live modules of both engines compute what the flow says, on the same bytes?

A contract compares what is declared. The audit looks at what was built and loaded: each side
reports the format, kernel and operand of every linear layer and the operators between them, read
from its own modules (:class:`ModelReport`), and this module compares the reports with the flow and
with each other. It looks inside neither engine, and imports no torch.
"""

import os
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.precision.environment import environment_violations
from megatron_rl.precision.exactness import PlatformName
from megatron_rl.precision.flow import PrecisionFlow, format_str
from megatron_rl.precision.kernels import kernel_violation
from megatron_rl.precision.partition import LinearPlan

MAX_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One linear layer as a side really has it, by Hugging Face module."""

    weight: str
    """Format of the weight, such as ``e4m3 128x128 pow2`` or ``bf16``."""
    input: str
    """Format of the input."""
    kernel: str
    """What computes the product."""
    digest: str | None
    """Hash of the operand's bytes (codes and scales, or the weight itself); None where the side
    cannot read it back."""
    fault: str | None = None
    """What is wrong with the operand in itself, such as a cached copy that is not its codes times
    its scales."""


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What one side computes."""

    linears: dict[str, Operand]
    """By Hugging Face module name; the output layer is ``lm_head``."""
    shared_operators: tuple[str, ...]
    """Operators that live modules compute as the flow's shared ones."""


class Reports(Protocol):
    """A side of the audit."""

    def report(self) -> ModelReport:
        """Reads the live modules."""


class ReportingPolicy(Reports, Protocol):
    """The training side, which knows the flow."""

    flow: PrecisionFlow
    plan: LinearPlan


def audit(policy: ReportingPolicy, engine: Reports, *, platform: PlatformName = "cpu") -> list[str]:
    """Compares the live modules of policy and engine with the flow and with each other.

    To be called after a weight sync. A collective wherever ``policy.report`` is one.

    Args:
        policy: The training side.
        engine: The rollout side.
        platform: Where both compute. On CUDA no operator is shared, and the process must have the
            environment that the flow needs.

    Returns:
        One sentence a violation, naming both sides; empty when rollout computes what training does.
    """
    flow, plan = policy.flow, policy.plan
    trained, served = policy.report(), engine.report()
    found = [
        f"{module} is in the policy and not in the rollout engine"
        for module in sorted(set(trained.linears) - set(served.linears))
    ]
    found += [
        f"{module} is in the rollout engine and not in the policy"
        for module in sorted(set(served.linears) - set(trained.linears))
    ]
    for module in trained.linears:
        if module in served.linears:
            quantised = plan.is_quantised(module)
            found += _compare(
                module, trained.linears[module], served.linears[module], flow, quantised
            )
            fault = kernel_violation(served.linears[module].kernel, platform)
            if fault and quantised and flow.serves_quantised:
                found.append(f"{module}: the rollout engine's product {fault}")
    if platform == "cuda":
        found += environment_violations(flow, os.environ)
    for operator in flow.shared_operators if platform == "cpu" else ():
        missing = [
            side
            for side, report in (("the policy", trained), ("the rollout engine", served))
            if operator not in report.shared_operators
        ]
        if missing:
            found.append(f"{operator} is to be shared; {' and '.join(missing)} computes another")
    return found


def summarise(violations: list[str]) -> str:
    """The first violations and how many more there are, as one clause."""
    more = len(violations) - MAX_NAMES
    return "; ".join(violations[:MAX_NAMES]) + (f"; and {more} more" if more > 0 else "")


def _compare(
    module: str, trained: Operand, served: Operand, flow: PrecisionFlow, quantised: bool
) -> list[str]:
    # An FP32 output layer is stored in the compute dtype too, and widened for its product.
    plain = format_str(flow.compute_dtype)
    found = []
    for side, operand, weight, inputs in (
        ("the policy", trained, flow.linear_weight, flow.linear_input),
        ("the rollout engine", served, flow.rollout_weight, flow.rollout_input),
    ):
        for role, actual, declared in (
            ("weight", operand.weight, weight),
            ("input", operand.input, inputs),
        ):
            expected = format_str(declared) if quantised else plain
            if actual != expected:
                found.append(
                    f"{module}: {side} has its {role} in {actual} ({operand.kernel}), and flow "
                    f"{flow.name!r} asks for {expected}"
                )
        if operand.fault:
            found.append(f"{module}: {operand.fault} in {side}")
    comparable = trained.digest is not None and served.digest is not None
    if not found and comparable and trained.digest != served.digest:
        found.append(
            f"{module}: the operand's bytes differ between the policy ({trained.digest}) and the "
            f"rollout engine ({served.digest})"
        )
    return found
