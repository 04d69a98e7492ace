"""What a precision flow means to Transformer Engine: Megatron's options and TE's recipe.

    flow ----> megatron_options     TransformerConfig(fp8="e4m3", fp8_recipe="blockwise")
         ----> configure_recipe     class attributes of TE's Float8BlockScaling
    live TE -> recipe_formats, quantizer_format: read back, for the audit

Megatron makes a new ``Float8BlockScaling`` for every forward pass and passes nothing but the
element, so scale rounding and floor are set where TE itself keeps them: on the class.

TE is imported inside functions only; nothing here loads it on a machine without CUDA.
"""

from dataclasses import replace
from typing import Any

from megatron_rl.precision.flow import Format, PrecisionFlow, format_str
from megatron_rl.precision.formats import BlockFormat, Element, LinearFormats

RECIPE = "blockwise"
TOKENS_MULTIPLE = 16
"""TE's products need tokens in multiples of this: they are contracted in the weight gradient."""
GATHER_TOKENS_MULTIPLE = 128
"""Tokens a rank under sequence parallelism, so that TE gathers codes: whole blocks of tokens."""


def training_formats(flow: PrecisionFlow) -> LinearFormats:
    """The flow's formats, if ``Float8BlockScaling`` computes them.

    Raises:
        ValueError: It does not; the message names the role and what TE computes.
    """
    return LinearFormats(
        weight=_checked(flow, "linear_weight", flow.linear_weight, 128, ("e4m3",)),
        input=_checked(flow, "linear_input", flow.linear_input, 1, ("e4m3",)),
        output_gradient=_checked(
            flow, "output_gradient", flow.output_gradient, 1, ("e4m3", "e5m2")
        ),
    )


def _checked(
    flow: PrecisionFlow, role: str, fmt: Format, block_rows: int, elements: tuple[Element, ...]
) -> BlockFormat:
    if isinstance(fmt, BlockFormat) and fmt.element in elements:
        # What is left to choose is the rounding of scales and the floor.
        computed = replace(
            BlockFormat(block_rows=block_rows, block_columns=128),
            element=fmt.element,
            scale_rounding=fmt.scale_rounding,
            amax_epsilon=fmt.amax_epsilon,
        )
        if fmt == computed and fmt.source_dtype == flow.compute_dtype:
            return fmt
    raise ValueError(
        f"flow {flow.name!r}: {role} is {format_str(fmt)} (computing in {flow.compute_dtype}), and "
        f"Transformer Engine's block scaling computes {' or '.join(elements)} "
        f"{block_rows}x128 from bfloat16 with multiplied FP32 scales; use such a format, as flow "
        "fp8 does"
    )


def megatron_options(flow: PrecisionFlow) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` that turn TE's FP8 on.

    Layers are exempted by the module spec, which gives them Megatron's own linears, and not by
    ``first_last_layers_bf16``: one mechanism for every reason there is.

    Raises:
        ValueError: As :func:`training_formats`.
    """
    gradient = training_formats(flow).output_gradient.element
    return {"fp8": "e4m3" if gradient == "e4m3" else "hybrid", "fp8_recipe": RECIPE}


def device_violation(flow: PrecisionFlow, capability: tuple[int, int]) -> str | None:
    """Why a CUDA device cannot compute the flow's block-scaled products; None where it can.

    Args:
        flow: The flow.
        capability: Compute capability of the device, such as ``(9, 0)``.
    """
    name = ".".join(map(str, capability))
    if capability != (9, 0) and capability[0] != 10:
        return (
            f"flow {flow.name!r} multiplies block-scaled FP8, which needs a device of compute "
            f"capability 9.0 (Hopper) or 10.x (Blackwell), and this one has {name}; use bf16"
        )
    formats = training_formats(flow)
    if capability[0] == 10 and "fp32" in (
        formats.weight.scale_rounding,
        formats.input.scale_rounding,
        formats.output_gradient.scale_rounding,
    ):
        return (
            f"flow {flow.name!r} has fp32 scales, and a device of compute capability {name} takes "
            "powers of two only; use pow2"
        )
    return None


def configure_recipe(flow: PrecisionFlow) -> None:
    """Gives TE's block-scaling recipe the flow's scale rounding and floors; imports TE.

    For the whole process, since TE keeps them on the class. The environment variable that sets the
    rounding is checked by the audit, not relied on.

    Raises:
        ValueError: As :func:`training_formats`.
    """
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    formats = training_formats(flow)
    for attribute, fmt in (
        ("fp8_quant_fwd_weight", formats.weight),
        ("fp8_quant_fwd_inp", formats.input),
        ("fp8_quant_bwd_grad", formats.output_gradient),
    ):
        params = QParams(power_2_scale=fmt.scale_rounding == "pow2", amax_epsilon=fmt.amax_epsilon)
        setattr(Float8BlockScaling, attribute, params)


def recipe_formats(recipe: Any) -> LinearFormats:
    """Formats that a ``Float8BlockScaling`` object computes."""
    from transformer_engine.common.recipe import Format as TEFormat

    gradient: Element = "e5m2" if recipe.fp8_format == TEFormat.HYBRID else "e4m3"
    return LinearFormats(
        weight=_format("e4m3", recipe.w_block_scaling_dim, recipe.fp8_quant_fwd_weight),
        input=_format("e4m3", recipe.x_block_scaling_dim, recipe.fp8_quant_fwd_inp),
        output_gradient=_format(gradient, recipe.grad_block_scaling_dim, recipe.fp8_quant_bwd_grad),
    )


def _format(element: Element, dimensions: int, params: Any) -> BlockFormat:
    return BlockFormat(
        element=element,
        block_rows=128 if dimensions == 2 else 1,
        scale_rounding="pow2" if params.power_2_scale else "fp32",
        amax_epsilon=params.amax_epsilon,
    )


def quantizer_format(quantizer: Any) -> BlockFormat:
    """Format of a live ``Float8BlockQuantizer``."""
    from transformer_engine.pytorch.constants import DType

    return BlockFormat(
        element="e4m3" if quantizer.dtype == DType.kFloat8E4M3 else "e5m2",
        block_rows=quantizer.block_len if quantizer.block_scaling_dim == 2 else 1,
        block_columns=quantizer.block_len,
        scale_rounding="pow2" if quantizer.force_pow_2_scales else "fp32",
        amax_epsilon=quantizer.amax_epsilon,
    )
