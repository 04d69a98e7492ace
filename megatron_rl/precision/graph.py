"""A flow as a graph: the format of every operand of every operator, on each side of a run.

Nodes are the products and the operators between them. Rollout is contained in training when each of
its nodes has the format of the same node in training's forward pass; see
:mod:`megatron_rl.precision.contract`.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.precision.flow import Format, PrecisionFlow, format_str

Side = Literal["training forward", "training backward", "rollout"]
SIDES: tuple[Side, ...] = ("training forward", "training backward", "rollout")
Row = tuple[str, str, str, str]
"""Module, operator, operand, format."""
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's fused linear layers; rollout's are the same four."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operand of one operator."""

    side: Side
    module: str
    """What kind of module: a linear layer, ``norm``, ``attention``, ..."""
    operator: str
    """What it computes."""
    operand: str
    """Which operand or result of it."""


def graph(flow: PrecisionFlow) -> dict[Node, str]:
    """Formats by node, in the order of a forward pass; of layers that the flow does not exempt."""
    forward = _forward(flow, flow.linear_weight, flow.linear_input, flow.attention)
    rollout = _forward(flow, flow.rollout_weight, flow.rollout_input, flow.kv_cache)
    sides: tuple[tuple[Side, list[Row]], ...] = (
        ("training forward", forward),
        ("training backward", _backward(flow)),
        ("rollout", rollout),
    )
    return {
        Node(side=side, module=module, operator=operator, operand=operand): text
        for side, rows in sides
        for module, operator, operand, text in rows
    }


def _forward(flow: PrecisionFlow, weight: Format, inputs: Format, keys: Format) -> list[Row]:
    rows: list[tuple[str, str, str, Format]] = []
    for module in LINEARS:
        rows += [(module, "product", "weight", weight), (module, "product", "input", inputs)]
    rows += [
        ("embedding", "lookup", "weight", flow.embedding),
        ("norm", "rms norm", "input and output", flow.norm),
        ("norm", "rms norm", "statistics", "float32"),
        ("rope", "rotation", "output", flow.rope),
        ("attention", "softmax(q k^T) v", "query and output", flow.attention),
        ("attention", "softmax(q k^T) v", "key and value", keys),
        ("activation", "silu(gate) * up", "output", flow.activation_function),
        ("residual", "add", "output", flow.residual_add),
        ("lm_head", "product", "weight and input", flow.lm_head),
        ("lm_head", "log-softmax", "logits", flow.logits),
    ]
    return [(module, operator, operand, format_str(fmt)) for module, operator, operand, fmt in rows]


def _backward(flow: PrecisionFlow) -> list[Row]:
    gradient, weight, inputs = map(
        format_str, (flow.output_gradient, flow.linear_weight, flow.linear_input)
    )
    along = "" if isinstance(flow.linear_input, str) else ", blocks along the tokens"
    rows: list[Row] = []
    for module in LINEARS:
        rows += [
            (module, "data gradient", "output gradient", gradient),
            (module, "data gradient", "weight", weight),
            (module, "weight gradient", "output gradient", gradient + along),
            (module, "weight gradient", "input", inputs + along),
        ]
    compute = format_str(flow.compute_dtype)
    rows += [(module, "gradient", "all", compute) for module in ("norm", "rope", "attention")]
    rows += [(module, "gradient", "all", compute) for module in ("activation", "residual")]
    rows += [
        ("lm_head", "gradient", "all", format_str(flow.lm_head)),
        ("optimizer", "reduction", "gradient", format_str(flow.gradient_reduction)),
        ("optimizer", "update", "master weight", format_str(flow.master_weight)),
    ]
    return rows


def describe_graph(flow: PrecisionFlow) -> str:
    """The graph as lines of text, a side after another; equal linear layers share a line."""
    lines: list[str] = []
    nodes = graph(flow)
    for side in SIDES:
        lines.append(f"{side}:")
        grouped: dict[tuple[str, str, str], list[str]] = {}
        for node, text in nodes.items():
            if node.side == side:
                key = (node.operator, node.operand, text)
                grouped.setdefault(key, []).append(node.module)
        for (operator, operand, text), modules in grouped.items():
            lines.append(f"  {_names(modules):28s} {operator:18s} {operand:18s} {text}")
    return "\n".join(lines)


def _names(modules: list[str]) -> str:
    return "linear layers" if tuple(modules) == LINEARS else ", ".join(modules)
