"""The configuration: round trip, overrides, and errors that name the remedy."""

import ast
import inspect
import subprocess
import sys

import pytest
import yaml

from megatron_rl.config import (
    ConfigError,
    RunConfig,
    apply_overrides,
    dump_config,
    load_config,
    read_yaml,
    validate,
)
from megatron_rl.config.base import ConfigSection
from megatron_rl.config.sft import SFTConfig


def tree(**changes):
    source = {"name": "a", "kind": "file", "path": "p.jsonl"}
    return {"model": {"path": "m"}, "data": {"train": [source]}} | changes


def all_sections():
    found, pending = set(), [RunConfig]
    while pending:
        section = pending.pop()
        found.add(section)
        for field in section.model_fields.values():
            for kind in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if inspect.isclass(kind) and issubclass(kind, ConfigSection) and kind not in found:
                    pending.append(kind)
    return found


def test_the_dump_reads_back_to_an_equal_configuration(tmp_path):
    config = validate(tree(rollout={"n": 4, "stop": ["\n"], "vllm": {"block_size": 16}}, seed=7))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_a_parameter_gather_overlaps_only_with_a_gradient_reduction():
    with pytest.raises(ConfigError, match="overlap_param_gather=true needs .*set both"):
        validate(tree(policy={"overlap_param_gather": True}))
    both = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    assert validate(tree(policy=both)).policy.overlap_param_gather


def test_every_recipe_is_valid():
    from pathlib import Path

    recipes = sorted(Path(__file__).parents[3].glob("scripts/recipes/*.yaml"))
    assert recipes
    for recipe in recipes:
        # Recipes of `megatron-rl sft` have a schema of their own.
        validate(read_yaml(recipe), SFTConfig if recipe.name.startswith("sft-") else RunConfig)


def test_every_field_is_documented():
    sections = all_sections()
    assert len(sections) >= 12
    for section in sections:
        source = ast.parse(inspect.getsource(section)).body[0]
        for name, field in section.model_fields.items():
            is_section = inspect.isclass(field.annotation) and issubclass(
                field.annotation, ConfigSection
            )
            assert field.description or is_section, f"{section.__name__}.{name}"
        assert ast.get_docstring(source), section.__name__


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.total_step=3"], "did you mean 'trainer.total_steps'"),
        (["policy.optimizer.learning_rat=1"], "unknown config key 'policy.optimizer.learning_rat'"),
        (["data.train.0.taks=x"], "did you mean 'data.train.0.task'"),
        (["rolout.n=2"], "did you mean 'rollout'"),
        (["trainer.total_steps=many"], "config key 'trainer.total_steps' is 'many'"),
        (["trainer.total_steps=0"], "greater than 0"),
        (["rollout.n=1"], "set rollout.n to 2 or more"),
        (["algorithm.mini_batch_size_prompts=5"], "does not divide data.train_batch_size=16"),
        (["trainer.resume_mode=path"], "needs trainer.resume_path"),
        (["rollout.timeout_s=2400"], "must be below trainer.collective_timeout_s=2400"),
        (["trainer.collective_timeout_s=60"], "rollout.timeout_s=1800 must be below"),
        (["data.train.0.kind=reasoning_gym"], "needs `task`"),
        (["data.train=[]"], "data.train"),
        (["model=null"], "config key 'model'"),
        (["nonsense"], "not of the form key=value"),
        (["seed.deep=1"], "goes through"),
        (["data.train.7.seed=1"], "no index of a list of 1"),
    ],
)
def test_mistakes_are_explained(overrides, message):
    with pytest.raises(ConfigError) as error:
        validate(apply_overrides(tree(seed=0), overrides))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_limit_of_an_evaluation_is_below_that_of_a_collective():
    with pytest.raises(ConfigError, match="evaluation.timeout_s=3000 must be below"):
        validate(tree(evaluation={"timeout_s": 3000}), SFTConfig)
    allowed = tree(evaluation={"timeout_s": 3000}, trainer={"collective_timeout_s": 3001})
    assert validate(allowed, SFTConfig).rollout.timeout_s == 3000


def test_overrides_are_typed_and_leave_the_tree_alone():
    original = tree()
    changed = apply_overrides(
        original, ["rollout.stop=['a']", "data.train.0.size=5", "logging.wandb=true"]
    )
    config = validate(changed)
    assert config.rollout.stop == ("a",) and config.data.train[0].size == 5
    assert config.logging.wandb is True and original == tree()


def test_a_group_of_one_is_fine_without_groups():
    config = validate(
        tree(rollout={"n": 1}, algorithm={"advantage_estimator": "reinforce_baseline"})
    )
    assert config.rollout.n == 1


def test_sections_are_frozen():
    config = validate(tree())
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_unreadable_files_are_explained(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([1]))
    with pytest.raises(ConfigError, match="must hold a mapping"):
        read_yaml(tmp_path / "list.yaml")


def test_configuration_and_flow_need_no_torch():
    code = (
        "import sys, megatron_rl.config, megatron_rl.precision, megatron_rl.launch.cli\n"
        "assert not {'torch', 'vllm', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
