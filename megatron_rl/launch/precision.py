"""The commands ``megatron-rl precision show | check | diff``: look at flows before a run."""

import argparse
from dataclasses import fields
from pathlib import Path

from megatron_rl.config import ConfigError, RunConfig, apply_overrides, read_yaml, validate
from megatron_rl.config.sft import SFTConfig
from megatron_rl.launch.compare import add_measuring_commands
from megatron_rl.launch.contract import expected_platform, quantised_layers, violations_of
from megatron_rl.precision import PrecisionFlow, flow_names, flow_of, resolve_flow
from megatron_rl.precision.contract import refusal
from megatron_rl.precision.exactness import exactness
from megatron_rl.precision.flow import role_str
from megatron_rl.precision.graph import describe_graph

NOT_CONTAINED = 2


def add_precision_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands to the parser of ``megatron-rl``."""
    precision = commands.add_parser("precision", help="look at precision flows")
    actions = precision.add_subparsers(required=True, metavar="ACTION")

    show = actions.add_parser("show", help="print a flow: every role, and the format of each node")
    show.add_argument("flow", nargs="?", help=f"one of {', '.join(flow_names())}; default bf16")
    show.add_argument("--config", type=Path, help="recipe whose flow is shown instead")
    show.set_defaults(run=_show)

    check = actions.add_parser("check", help="say whether a run's rollout is contained in training")
    check.add_argument("--config", type=Path, required=True, help="recipe, a YAML file")
    check.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    check.set_defaults(run=_check)

    diff = actions.add_parser("diff", help="roles that differ between two flows or recipes")
    diff.add_argument("first", help="name of a flow, or a recipe (a YAML file)")
    diff.add_argument("second", help="name of a flow, or a recipe (a YAML file)")
    diff.set_defaults(run=_diff)

    add_measuring_commands(actions)


def _show(arguments: argparse.Namespace) -> int:
    if arguments.config is not None and arguments.flow is not None:
        raise ConfigError("give a flow or --config, not both")
    if arguments.config is not None:
        flow = flow_of(_load(arguments.config, ()).precision)
    else:
        flow = resolve_flow(arguments.flow or "bf16")
    print(flow.short_str())
    print(flow.describe())
    print(describe_graph(flow))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    config = _load(arguments.config, arguments.overrides)
    flow = flow_of(config.precision)
    print(f"flow: {flow.short_str()}")
    plan = None
    if flow.trains_quantised or flow.serves_quantised:
        from megatron_rl.launch.models import resolve_model

        plan = quantised_layers(config, resolve_model(config.model.path))
        assert plan is not None
        print(f"quantised: {plan.summary()}")
    print(f"log-probs: {_exactness_statement(config, flow)}")
    violations = violations_of(config, plan)
    for violation in violations:
        print(f"{violation.kind}: {violation.sentence}")
    if refusal(flow, violations, allow_mismatch=False) is None:
        print("contained")
        return 0
    return NOT_CONTAINED


def _diff(arguments: argparse.Namespace) -> int:
    first, second = _flow(arguments.first), _flow(arguments.second)
    names = [field.name for field in fields(PrecisionFlow) if field.name != "name"]
    rows = [
        (name, role_str(getattr(first, name)), role_str(getattr(second, name)))
        for name in names
        if getattr(first, name) != getattr(second, name)
    ]
    for name, before, after in rows:
        print(f"{name:22s} {before}  ->  {after}")
    if not rows:
        print("no role differs")
    return 0


def _exactness_statement(config: RunConfig | SFTConfig, flow: PrecisionFlow) -> str:
    platform = expected_platform()
    isa = None
    if platform == "cpu":
        from megatron_rl.platforms import cpu_isa

        isa = cpu_isa()
    return exactness(
        flow,
        platform=platform,
        train_tp=config.policy.tensor_model_parallel_size,
        rollout_tp=config.rollout.tensor_parallel_size,
        sequence_parallel=config.policy.sequence_parallel,
        cpu_isa=isa,
    ).statement()


def _flow(text: str) -> PrecisionFlow:
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return flow_of(_load(path, ()).precision)
    return resolve_flow(text)


def _load(path: Path, overrides: list[str] | tuple[()]) -> RunConfig | SFTConfig:
    """A recipe of ``train`` or of ``sft``: what validates as neither is reported as the former."""
    tree = apply_overrides(read_yaml(path), overrides)
    try:
        return validate(tree, RunConfig)
    except ConfigError:
        try:
            return validate(tree, SFTConfig)
        except ConfigError:
            pass
        raise
