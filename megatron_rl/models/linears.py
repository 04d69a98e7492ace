"""The linear layers of a model, as the precision flow looks at them."""

from megatron_rl.models.layout import FusedGateUp, FusedQKV
from megatron_rl.models.mapping import ParameterMap
from megatron_rl.precision.partition import LinearShape


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
        assert entry.tp_axis in (0, 1), entry.megatron_name
        shapes.append(
            LinearShape(
                name=entry.megatron_name.removesuffix(".weight"),
                hf_modules=tuple(name.removesuffix(".weight") for name in entry.hf_names),
                part_rows=rows,
                columns=entry.hf_shapes[0][1],
                row_unit=unit,
                tp_axis=entry.tp_axis,
                layer=entry.layer,
            )
        )
    return tuple(shapes)
