"""Reads, overrides, validates and dumps a run's configuration.

A wrong configuration ends in one :class:`ConfigError` that names the key, the value and the remedy,
before anything heavy is imported. Deliberately does no interpolation and no includes: a recipe is
one file that can be read from top to bottom.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.run import RunConfig

Section = TypeVar("Section", bound=ConfigSection)


class ConfigError(ValueError):
    """The configuration is wrong; the message is one sentence for the user."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises:
        ConfigError: The file is missing, is no YAML, or is not a mapping.
    """
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {detail}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(loaded).__name__}")
    return loaded


def apply_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns ``tree`` with dotted ``key=value`` overrides applied; values are parsed as YAML.

    List items are addressed by index (``data.train.0.seed=3``).

    Raises:
        ConfigError: An override has no ``=``, has a value that is no YAML, or goes through
            something that is no section.
    """
    result: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(tree)))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"override {override!r} is not of the form key=value, e.g. trainer.total_steps=20"
            )
        node: Any = result
        *parents, leaf = key.split(".")
        for parent in parents:
            node = _child(node, parent, key)
        if isinstance(node, list):
            node[_index(node, leaf, key)] = _value(text, key)
        elif isinstance(node, dict):
            node[leaf] = _value(text, key)
        else:
            raise ConfigError(f"override {key!r} goes through {parents[-1]!r}, which is no section")
    return result


def _value(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {key!r}: the value {text!r} is not valid YAML; put text in quotes"
        ) from error


def _child(node: Any, name: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, name, key)]
    if not isinstance(node, dict):
        raise ConfigError(f"override {key!r} goes through a value before {name!r}, not a section")
    if node.get(name) is None:
        node[name] = {}
    return node[name]


def _index(node: list[Any], text: str, key: str) -> int:
    if not text.isdecimal() or int(text) >= len(node):
        raise ConfigError(f"override {key!r}: {text!r} is no index of a list of {len(node)}")
    return int(text)


def validate(tree: Mapping[str, Any], schema: type[Section] = RunConfig) -> Section:  # type: ignore[assignment]
    """Checks a plain tree against ``schema``.

    Raises:
        ConfigError: One sentence a problem, with the nearest valid name for an unknown key.
    """
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        problems = _without_consequences(error.errors())
        raise ConfigError("; ".join(_sentence(problem, schema) for problem in problems)) from error


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a recipe, applies overrides and validates the result."""
    return validate(apply_overrides(read_yaml(path), overrides))


def dump_config(config: ConfigSection) -> str:
    """The resolved configuration as YAML that :func:`load_config` reads back to an equal one."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)
    return text


def _without_consequences(problems: list[Any]) -> list[Any]:
    """Drops a problem of a container that only follows from a problem inside it."""
    return [
        problem
        for problem in problems
        if not any(
            len(other["loc"]) > len(problem["loc"])
            and other["loc"][: len(problem["loc"])] == problem["loc"]
            for other in problems
        )
    ]


def _sentence(problem: Any, schema: type[ConfigSection]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location) or "config"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = (
            f"did you mean {'.'.join([*location[:-1], nearest[0]])!r}?"
            if nearest
            else f"valid here: {', '.join(sorted(known))}"
        )
        return f"unknown config key {key!r}; {hint}"
    if problem["type"] == "missing":
        return f"config key {key!r} is required; set it"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message if not location else f"config key {key!r}: {message}"
    return f"config key {key!r} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _known_keys(schema: type[BaseModel], location: list[str]) -> list[str]:
    """Names valid in the section at ``location``."""
    current: type[BaseModel] | None = schema
    for part in location:
        if part.isdigit():
            continue
        field = current.model_fields.get(part) if current else None
        current = _section_type(field.annotation) if field else None
    return list(current.model_fields) if current else []


def _section_type(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _section_type(argument)
        if found:
            return found
    return None
