"""Numbers of a Hugging Face config, each of the kind that it must be."""

from collections.abc import Mapping
from typing import Any


def required(config: Mapping[str, Any], key: str) -> Any:
    """A value that a config must have.

    Raises:
        ValueError: The key is absent or null.
    """
    if config.get(key) is None:
        raise ValueError(f"The model config has no {key}; config.json must set it.")
    return config[key]


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """An integer of at least 1.

    Raises:
        ValueError: The value is absent or something else.
    """
    value = required(config, key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r} in the model config must be a positive integer.")
    return value


def positive_float(config: Mapping[str, Any], key: str) -> float:
    """A number above 0.

    Raises:
        ValueError: The value is absent or something else.
    """
    value = required(config, key)
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"{key}={value!r} in the model config must be a positive number.")
    return float(value)
