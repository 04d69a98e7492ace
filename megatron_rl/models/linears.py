"""The linear layers of a model, as the precision flow looks at them."""

from megatron_rl.models.layout import FusedGateUp, FusedQKV, Replicated
from megatron_rl.models.mapping import ParameterMap
from megatron_rl.precision import LinearPlan, LinearShape, PrecisionFlow, plan_linears


def linear_plan(parameters: ParameterMap, flow: PrecisionFlow) -> LinearPlan:
    """Which linear layers of a model a flow quantises; all empty for a flow that quantises none.

    Raises:
        ValueError: The flow exempts modules that the model does not have, or no layer is left that
            it could quantise.
    """
    if not (flow.trains_quantised or flow.serves_quantised):
        return LinearPlan(quantised=(), exempt=())
    plan = plan_linears(
        linear_shapes(parameters),
        num_layers=parameters.spec.num_layers,
        exempt_first_layers=flow.exempt_first_layers,
        exempt_last_layers=flow.exempt_last_layers,
        exempt_modules=flow.exempt_modules,
    )
    if not plan.quantised:
        raise ValueError(
            f"flow {flow.name!r} can quantise no linear layer of this model: {plan.summary()}; "
            "use the flow bf16, or a model whose dimensions are multiples of 128"
        )
    return plan


def linear_shapes(parameters: ParameterMap) -> tuple[LinearShape, ...]:
    """Every linear layer inside the decoder, in forward order; not the embedding and the head."""
    shapes = []
    for entry in parameters:
        if entry.layer is None or len(entry.hf_shapes[0]) != 2:
            continue
        rows = tuple(shape[0] for shape in entry.hf_shapes)
        unit = sum(rows)
        if isinstance(entry.layout, FusedQKV):
            unit = parameters.spec.head_dim
        elif isinstance(entry.layout, FusedGateUp):
            unit = rows[0]
        name = entry.megatron_name.removesuffix(".weight")
        is_router = isinstance(entry.layout, Replicated)
        experts, is_expert, _ = name.partition(".local_experts.")
        shapes.append(
            LinearShape(
                name=name,
                hf_modules=tuple(name.removesuffix(".weight") for name in entry.hf_names),
                part_rows=rows,
                columns=entry.hf_shapes[0][1],
                row_unit=unit,
                tp_axis=entry.tp_axis,
                layer=entry.layer,
                never_because="a router, which picks experts" if is_router else None,
                together=experts if is_expert else None,
            )
        )
    return tuple(shapes)
