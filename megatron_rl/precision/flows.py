"""The named flows, and how a configuration composes one of its own."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from megatron_rl.config import PrecisionConfig
from megatron_rl.precision.flow import (
    BETWEEN_PRODUCTS,
    SHAREABLE_OPERATORS,
    SHORT,
    DType,
    Format,
    LossScale,
    PrecisionFlow,
)
from megatron_rl.precision.formats import VLLM_POW2_AMAX_EPSILON, BlockFormat, MXFormat

WEIGHT = BlockFormat(block_rows=128, block_columns=128)
INPUT = BlockFormat(block_rows=1, block_columns=128, amax_epsilon=VLLM_POW2_AMAX_EPSILON)
"""The floor under the maximum makes Transformer Engine's scales of tiny groups vLLM's."""
GRADIENT = BlockFormat(block_rows=1, block_columns=128)


def _uniform(name: str, dtype: DType, **roles: Any) -> PrecisionFlow:
    defaults: dict[str, Any] = dict(
        linear_weight=dtype,
        linear_input=dtype,
        output_gradient=dtype,
        lm_head=dtype,
        shared_operators=() if dtype == "float32" else SHAREABLE_OPERATORS,
        **dict.fromkeys(BETWEEN_PRODUCTS, dtype),
    )
    return PrecisionFlow(name=name, **(defaults | roles))


_FLOWS: dict[str, Callable[[], PrecisionFlow]] = {
    "bf16": lambda: _uniform("bf16", "bfloat16"),
    "fp16": lambda: _uniform("fp16", "float16", loss_scale=LossScale()),
    "fp8": lambda: _uniform(
        "fp8", "bfloat16", linear_weight=WEIGHT, linear_input=INPUT, output_gradient=GRADIENT
    ),
    "fp8_rollout": lambda: _uniform(
        "fp8_rollout", "bfloat16", rollout_linear_weight=WEIGHT, rollout_linear_input=INPUT
    ),
    "fp32": lambda: _uniform("fp32", "float32"),
    "mxfp8": lambda: _uniform(
        "mxfp8",
        "bfloat16",
        linear_weight=MXFormat(),
        linear_input=MXFormat(),
        output_gradient=MXFormat(),
    ),
}


def flow_names() -> list[str]:
    """Names that :func:`resolve_flow` accepts."""
    return sorted(_FLOWS)


def flow_of(config: PrecisionConfig) -> PrecisionFlow:
    """The flow of a run's configuration.

    Raises:
        ValueError: As :func:`resolve_flow`.
    """
    flow = resolve_flow(config.flow)
    return flow if config.exact else replace(flow, shared_operators=())


def resolve_flow(choice: str | Mapping[str, Any]) -> PrecisionFlow:
    """Looks a flow up by name, or composes one.

    Args:
        choice: A name; or a mapping with ``base`` (a name) and roles of
            :class:`~megatron_rl.precision.PrecisionFlow` that differ from it. A format is a dtype
            (``bf16``), a string such as ``e4m3 1x128 pow2``, or a mapping of
            :class:`~megatron_rl.precision.BlockFormat` fields.

    Raises:
        ValueError: No such flow, role or format; the message says which there are.
    """
    if isinstance(choice, str):
        if choice not in _FLOWS:
            raise ValueError(
                f"precision.flow={choice!r} is not a flow of this version, which has "
                f"{', '.join(flow_names())}; {_nearest(choice, list(_FLOWS))}"
            )
        return _FLOWS[choice]()
    if "base" not in choice:
        raise ValueError(
            "precision.flow as a mapping needs `base`, the name of the flow that it changes: one "
            f"of {', '.join(flow_names())}"
        )
    base = resolve_flow(choice["base"])
    roles = {field.name for field in fields(PrecisionFlow)}
    changes: dict[str, Any] = {}
    for role, value in choice.items():
        if role == "base":
            continue
        if role not in roles:
            raise ValueError(
                f"precision.flow.{role} is no role of a flow; {_nearest(role, sorted(roles))}"
            )
        changes[role] = _role_value(role, value)
    changes.setdefault("name", f"{base.name}*" if changes else base.name)
    return replace(base, **changes)


def _role_value(role: str, value: Any) -> Any:
    if role == "name":
        return str(value)
    if role.startswith("exempt_") and role.endswith("_layers"):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"precision.flow.{role}={value!r} must be a number of layers, 0 or up")
        return value
    if role in ("exempt_modules", "shared_operators"):
        items = (value,) if isinstance(value, str) else tuple(value or ())
        if role == "shared_operators" and (unknown := set(items) - set(SHAREABLE_OPERATORS)):
            raise ValueError(
                f"precision.flow.shared_operators: {sorted(unknown)} are none of "
                f"{', '.join(SHAREABLE_OPERATORS)}"
            )
        return items
    if role == "loss_scale":
        known = [field.name for field in fields(LossScale)]
        if value is None:
            return None
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            raise ValueError(
                f"precision.flow.loss_scale={value!r} must be a mapping of {', '.join(known)}"
            )
        return LossScale(**value)
    if value is None and role.startswith("rollout_"):
        return None
    return parse_format(value, f"precision.flow.{role}")


def parse_format(value: Any, what: str) -> Format:
    """A format from a configuration: ``bf16``, ``e4m3 1x128 pow2``, ``mx-e4m3``, or fields.

    Args:
        value: What the configuration holds.
        what: The key that holds it, for the message.

    Raises:
        ValueError: It is no format.
    """
    if isinstance(value, Mapping):
        known = {field.name for field in fields(BlockFormat)}
        if not set(value) <= known:
            wrong = sorted(set(value) - known)[0]
            raise ValueError(
                f"{what}: {wrong!r} is no field of a block format; {_nearest(wrong, sorted(known))}"
            )
        return BlockFormat(**value)
    text = str(value)
    long = {short: dtype for dtype, short in SHORT.items()}
    if text in long or text in SHORT:
        return cast(DType, long.get(text, text))
    words = text.split()
    if words[:1] == ["mx-e4m3"] or words[:1] == ["mx-e5m2"]:
        return MXFormat(element=cast(Any, words[0][3:]))
    if len(words) in (2, 3) and words[0] in ("e4m3", "e5m2") and words[1].count("x") == 1:
        rows, columns = words[1].split("x")
        mode = words[2] if len(words) == 3 else "pow2"
        if rows.isdecimal() and columns.isdecimal() and mode in ("pow2", "fp32"):
            return BlockFormat(
                element=cast(Any, words[0]),
                block_rows=int(rows),
                block_columns=int(columns),
                scale_rounding=cast(Any, mode),
            )
    raise ValueError(
        f"{what}={text!r} is no format; expected bf16, fp16, fp32, a block format such as "
        "'e4m3 1x128 pow2', or a mapping of its fields"
    )


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(known)}"
