"""The rotary-embedding part of a Hugging Face config.

There are two spellings. transformers 4 writes `rope_theta` beside `rope_scaling`, where
`rope_scaling` is null or a dict whose type is under `rope_type` or, older, `type`. transformers 5
writes everything into `rope_parameters`. Both are read into one `RopeSpec`; a file that carries
both must agree with itself. Methods that change with the sequence length, or scale attention
(dynamic, yarn, longrope), are refused.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.models.spec import RopeSpec

_DEFAULT_THETA = 10000.0
# What each type reads besides theta. Other keys would be ignored by transformers, too.
_READS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rotary embedding of a Hugging Face config.

    Args:
        config: Content of `config.json`, in either spelling. `default_rope_theta`, which only a
            family's defaults have, is theta where neither spelling gives one.

    Returns:
        The rotary embedding, theta defaulting to 10000 as in transformers.

    Raises:
        ValueError: The type is unknown, a factor is missing or malformed, the two spellings
            disagree, or only a part of each head is rotated.
    """
    readings = {
        key: _read(key, config[key], config)
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key)
    }
    if len(set(readings.values())) > 1:
        raise ValueError(
            f"rope_parameters={config['rope_parameters']!r} and "
            f"rope_scaling={config['rope_scaling']!r} (with rope_theta="
            f"{config.get('rope_theta')!r}) in the model config disagree; remove one of them."
        )
    if readings:
        return next(iter(readings.values()))
    return _read("rope_scaling", {}, config)


def _read(key: str, values: Any, config: Mapping[str, Any]) -> RopeSpec:
    if not isinstance(values, Mapping):
        raise ValueError(f"{key}={values!r} in the model config must be a mapping or null.")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ValueError(
            f"{key} in the model config has one entry per layer type ({', '.join(values)}), which "
            "is not implemented."
        )
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _READS:
        raise ValueError(
            f"{key} in the model config has rope_type={kind!r}, which is not implemented; "
            f"supported are {', '.join(_READS)}."
        )
    for source in (values, config):
        partial = source.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise ValueError(
                f"partial_rotary_factor={partial!r} in the model config is not implemented: the "
                "whole head must be rotated."
            )
    theta, outer = values.get("rope_theta"), config.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        raise ValueError(
            f"rope_theta={outer!r} and {key}.rope_theta={theta!r} in the model config disagree; "
            "remove one of them."
        )
    if theta is None:
        theta = config.get("default_rope_theta", _DEFAULT_THETA) if outer is None else outer
    numbers = {name: _number(f"{key}.{name}", values.get(name)) for name in _READS[kind]}
    original = numbers.pop("original_max_position_embeddings", None)
    if kind == "llama3" and not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
        raise ValueError(
            f"{key}.low_freq_factor={numbers['low_freq_factor']} in the model config must be below "
            f"high_freq_factor={numbers['high_freq_factor']}."
        )
    return RopeSpec(
        theta=_number("rope_theta", theta),
        type=kind,
        original_max_position_embeddings=None if original is None else int(original),
        **numbers,
    )


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not (value > 0 and math.isfinite(value)):
        problem = "is missing from" if value is None else f"is {value!r} in"
        raise ValueError(f"{name} {problem} the model config: it must be a positive number.")
    return float(value)
