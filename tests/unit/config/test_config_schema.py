"""The schema, walked: every section documents its fields and explains a misspelt one."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from typing import get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_rl.config
from megatron_rl.config import ConfigError, RunConfig, apply_overrides, dump_config, validate
from megatron_rl.config.base import ConfigSection


def tree(**changes):
    source = {"name": "a", "kind": "file", "path": "p.jsonl"}
    return {"model": {"path": "m"}, "data": {"train": [source]}} | changes


def section_of(annotation):
    """The section that a field holds, whether itself, optional or as items of a tuple."""
    if inspect.isclass(annotation) and issubclass(annotation, ConfigSection):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def fields_by_path(section=RunConfig, prefix=()):
    """(path of the section, field name) of every field; the items of a list are at index 0."""
    for name, field in section.model_fields.items():
        yield prefix, name
        inner = section_of(field.annotation)
        if inner:
            is_list = get_origin(field.annotation) is tuple
            yield from fields_by_path(inner, (*prefix, name, *(("0",) if is_list else ())))


def sections_of_all_files():
    for module in pkgutil.iter_modules(megatron_rl.config.__path__):
        importlib.import_module(f"megatron_rl.config.{module.name}")
    pending, found = [ConfigSection], []
    while pending:
        subclasses = pending.pop().__subclasses__()
        found += [c for c in subclasses if c.__module__.startswith("megatron_rl.config.")]
        pending += subclasses
    return sorted(found, key=lambda section: section.__name__)


SECTIONS = sections_of_all_files()
FIELDS = sorted(fields_by_path())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_section_of_every_file_is_documented_field_by_field(section):
    assert section.__doc__ and section.__doc__ != ConfigSection.__doc__
    for name, field in section.model_fields.items():
        # A field that holds one section may leave the explanation to that section.
        if section_of(field.annotation) is not field.annotation:
            assert field.description and field.description.strip(), name


def test_the_walk_reaches_every_depth():
    depths = {len(path) for path, _ in FIELDS}
    assert depths == {0, 1, 2, 3} and (("data", "train", "0"), "seed") in FIELDS


@pytest.mark.parametrize(("path", "name"), FIELDS, ids=lambda p: ".".join(p) if p else "")
def test_a_misspelt_key_names_the_right_one_wherever_it_stands(path, name):
    wrong = name + "x"
    changed = tree()
    node = changed
    if path[:2] == ("data", "val"):
        changed["data"]["val"] = [dict(changed["data"]["train"][0])]
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[wrong] = 1
    with pytest.raises(ConfigError) as error:
        validate(changed)
    message = str(error.value)
    assert f"unknown config key {'.'.join((*path, wrong))!r}" in message
    assert f"did you mean {'.'.join((*path, name))!r}?" in message


def test_a_key_like_no_other_lists_the_valid_ones():
    with pytest.raises(ConfigError) as error:
        validate(tree(evaluation={"zzzzzz": 1}))
    assert "valid here: at_start, greedy, interval_steps, num_samples, temp" in str(error.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        validate(tree(seed=-1, rolout={}, trainer={"total_steps": 0}))
    assert all(key in str(error.value) for key in ("'seed'", "'rolout'", "'trainer.total_steps'"))


positive = st.floats(1e-12, 1e12)
changes = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(min_size=1),
        "seed": st.integers(0, 2**63),
        "reward": st.fixed_dictionaries(
            {"timeout_s": positive, "failure_score": st.floats(allow_nan=False, width=64)}
        ),
        "rollout": st.fixed_dictionaries(
            {"n": st.integers(2, 64), "temperature": positive, "stop": st.lists(st.text())},
            optional={"vllm": st.dictionaries(st.text(), st.booleans() | st.integers())},
        ),
        "algorithm": st.fixed_dictionaries(
            {"dual_clip": st.none() | st.floats(1.01, 10), "kl": st.just({"estimator": "k1"})}
        ),
        "policy": st.fixed_dictionaries({"optimizer": st.fixed_dictionaries({"lr": positive})}),
    },
)


@settings(max_examples=60)
@given(changes)
def test_any_valid_configuration_survives_its_dump(changed):
    if "reward" in changed and abs(changed["reward"]["failure_score"]) == float("inf"):
        changed["reward"]["failure_score"] = 0.0
    config = validate(tree(**changed))
    assert validate(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("key", ["algorithm.entropy_coefficient", "policy.optimizer.lr"])
def test_numbers_are_finite(key, value):
    with pytest.raises(ConfigError, match=f"config key '{key}' is"):
        validate(apply_overrides(tree(), [f"{key}={value}"]))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=a=b", "a=b"),
        ("seed=12", 12),
        ("rollout.temperature=1e-1", 0.1),
        ("policy.share_prompt_prefix=off", False),
        ("trainer.resume_path=null", None),
        ("data.train.0.seed=5", 5),
        ("policy.megatron={a: [1, x]}", {"a": [1, "x"]}),
        ("rollout.vllm.compilation.level=3", {"compilation": {"level": 3}}),
        ("name='yes'", "yes"),
    ],
)
def test_override_values_are_yaml(override, value):
    config = validate(apply_overrides(tree(), [override]))
    node = config
    path = override.partition("=")[0].removesuffix(".compilation.level")
    for part in path.split("."):
        node = node[int(part)] if part.isdecimal() else getattr(node, part)
    assert node == value and type(node) is type(value)


def test_the_last_override_of_a_key_wins():
    changed = apply_overrides(tree(), ["seed=1", "trainer.total_steps=3", "seed=2"])
    assert (changed["seed"], changed["trainer"]) == (2, {"total_steps": 3})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("=3", "not of the form key=value"),
        ("seed=[1", r"override 'seed': the value '\[1' is not valid YAML; put text in quotes"),
        ("data.train.0.prompt_template={question", "not valid YAML"),
        ("data.train.-1.size=3", "no index of a list of 1"),
        ("data.train.\N{SUPERSCRIPT TWO}=3", "no index of a list of 1"),
        ("model.path.deep.er=1", "goes through a value before 'deep'"),
        ("model.path.deep=1", "goes through 'path', which is no section"),
    ],
)
def test_a_bad_override_is_one_sentence(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        apply_overrides(tree(), [override])
    assert "\n" not in str(error.value)


def test_nested_sections_and_lists_are_frozen():
    config = validate(tree())
    with pytest.raises(ValueError, match="frozen"):
        config.policy.optimizer.lr = 1.0
    with pytest.raises(ValueError, match="frozen"):
        config.data.train[0].seed = 1
    assert isinstance(config.data.train, tuple)


def test_checking_a_run_and_its_flow_needs_no_torch():
    code = (
        "import sys, yaml\n"
        "from megatron_rl.config import validate, dump_config\n"
        "from megatron_rl.precision import LinearPlan, flow_names, resolve_flow, vllm_precision\n"
        f"dump_config(validate({tree()!r}))\n"
        "for flow in map(resolve_flow, flow_names()):\n"
        "    assert flow.describe() and flow.short_str()\n"
        "    if flow.name != 'mxfp8':\n"
        "        assert vllm_precision(flow, LinearPlan(quantised=(), exempt=()))\n"
        "assert not {'torch', 'numpy', 'vllm', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
