"""The contract of a run: rollout computes nothing that training's forward pass does not.

Training and rollout derive from one flow, so most differences cannot be written down. What a
composed flow, a tensor-parallel size or a platform can still break is found here, before anything
is launched, and each violation is one sentence that names both sides.

This module imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.precision.exactness import PlatformName
from megatron_rl.precision.flow import SHORT, PrecisionFlow, format_str
from megatron_rl.precision.formats import BlockFormat, MXFormat
from megatron_rl.precision.graph import LINEARS, Node, graph
from megatron_rl.precision.partition import LinearPlan, partition_violations

Kind = Literal["format", "partition", "unsupported", "stated"]


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One place where rollout is not contained in training."""

    kind: Kind
    """``format``: the formats differ, which ``precision.allow_mismatch`` allows. ``partition`` and
    ``unsupported``: it cannot be computed, and is never allowed. ``stated``: a known limit of what
    the two sides agree on, which stops nothing."""
    sentence: str
    """Both sides of it, in one sentence without a full stop."""


def contract(
    flow: PrecisionFlow,
    plan: LinearPlan | None = None,
    *,
    train_tp: int = 1,
    rollout_tp: int = 1,
    platform: PlatformName = "cpu",
) -> list[Violation]:
    """Every violation of a flow on a layout; empty where rollout is contained in training.

    Args:
        flow: The flow.
        plan: Which linear layers of the model it quantises; None leaves the partition unchecked.
        train_tp: Tensor-parallel size of training.
        rollout_tp: Tensor-parallel size of rollout.
        platform: Where both compute.
    """
    found = [Violation(kind="unsupported", sentence=text) for text in _unsupported(flow, platform)]
    found += [Violation(kind="format", sentence=text) for text in _format_differences(flow)]
    if plan is not None:
        # A side that quantises nothing may be cut as it likes.
        sentences = partition_violations(
            plan,
            train_tp=train_tp if flow.trains_quantised else 1,
            rollout_tp=rollout_tp if flow.serves_quantised else 1,
        )
        found += [Violation(kind="partition", sentence=text) for text in sentences]
    found += [Violation(kind="stated", sentence=text) for text in _stated(flow, platform)]
    return found


def refusal(
    flow: PrecisionFlow, violations: Sequence[Violation], *, allow_mismatch: bool
) -> str | None:
    """Why a run may not start, in one sentence; None where it may."""
    fixed = [v.sentence for v in violations if v.kind in ("partition", "unsupported")]
    formats = [v.sentence for v in violations if v.kind == "format"]
    if fixed:
        return f"precision.flow={flow.name!r} cannot be run here: {'; '.join(fixed)}"
    if formats and not allow_mismatch:
        return (
            f"precision.flow={flow.name!r} is refused, since rollout is not contained in training: "
            f"{'; '.join(formats)}; choose a flow with one format for both (fp8 for block FP8), or "
            "set precision.allow_mismatch=true to run it as a mismatched baseline"
        )
    return None


def mismatch_statement(violations: Sequence[Violation]) -> str | None:
    """What every header of an allowed mismatched run says; None where formats agree."""
    formats = [v.sentence for v in violations if v.kind == "format"]
    return f"MISMATCHED: {'; '.join(formats)}" if formats else None


def _format_differences(flow: PrecisionFlow) -> list[str]:
    """Roles whose rollout format is not training's; modules with equal differences share one."""
    nodes = graph(flow)
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for node, served in nodes.items():
        if node.side != "rollout":
            continue
        twin = Node(
            side="training forward",
            module=node.module,
            operator=node.operator,
            operand=node.operand,
        )
        if nodes[twin] != served:
            grouped.setdefault((node.operand, served, nodes[twin]), []).append(node.module)
    return [
        f"the {operand} of {_modules(modules)} is {served} in rollout and {trained} in training"
        for (operand, served, trained), modules in grouped.items()
    ]


def _modules(modules: list[str]) -> str:
    return "the linear layers" if tuple(modules) == LINEARS else ", ".join(modules)


def _unsupported(flow: PrecisionFlow, platform: PlatformName) -> list[str]:
    found = []
    training = flow.linear_weight, flow.linear_input
    rollout = flow.rollout_weight, flow.rollout_input
    sides = {"training": training, "rollout": rollout}
    if training == rollout:
        sides = {"training and rollout": training}
    for side, (weight, inputs) in sides.items():
        what = f"{side} would multiply {format_str(weight)} weights by {format_str(inputs)} inputs"
        if isinstance(weight, MXFormat) or isinstance(inputs, MXFormat):
            found.append(
                f"{what}, and no linear layer of this version computes MX formats; use the flow fp8"
            )
        elif isinstance(weight, str) != isinstance(inputs, str):
            found.append(
                f"{what}, and linear layers quantise both operands or neither; give both a block "
                "format"
            )
    if flow.trains_quantised and flow.rollout_weight != flow.linear_weight:
        found.append(
            f"training multiplies by {format_str(flow.linear_weight)} weights and rollout by "
            f"{format_str(flow.rollout_weight)}, and rollout is sent the codes that training made; "
            "remove rollout_linear_weight"
        )
    if platform == "cuda" and flow.compute_dtype == "float16" and _block_formats(flow):
        found.append(
            f"training and rollout would compute in {SHORT[flow.compute_dtype]} around block-FP8 "
            "linear layers, which on CUDA take and give bf16; use bf16 for the other roles"
        )
    return found


def _stated(flow: PrecisionFlow, platform: PlatformName) -> list[str]:
    if not any(fmt.scale_rounding == "fp32" for fmt in _block_formats(flow)):
        return []
    if platform == "cpu":
        return [
            "scales are fp32: on a CPU training and rollout multiply fp32 operands, which GPU "
            "kernels do not; use pow2 scales for operands that are exact in bf16"
        ]
    return [
        "scales are fp32: the activation quantisers of training and rollout differ by a unit in "
        "the last place in about a third of the scales; use pow2 scales, where they agree"
    ]


def _block_formats(flow: PrecisionFlow) -> list[BlockFormat]:
    formats = (
        flow.linear_weight,
        flow.linear_input,
        flow.output_gradient,
        flow.rollout_weight,
        flow.rollout_input,
    )
    return [fmt for fmt in formats if isinstance(fmt, BlockFormat)]
