"""Runs a validated configuration: environment first, heavy imports second, then the trainer."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.precision import flow_of
from megatron_rl.trainer.errors import MismatchError

FAILED = 1


def execute(config: Any, choose: Callable[[], Callable[..., Path]]) -> int:
    """Runs a configuration to its end.

    Args:
        config: A ``RunConfig`` or ``SFTConfig``.
        choose: Imports and returns the function that runs it, such as ``run_training``; called
            once the environment is set.

    Returns:
        The exit code: 0 done, 1 the run failed.

    Raises:
        ValueError: The input is wrong.
    """
    from megatron_rl.launch.contract import check_partition
    from megatron_rl.launch.environment import export_environment, run_environment
    from megatron_rl.launch.models import resolve_model
    from megatron_rl.launch.quiet import configure_logging, open_console, quiet

    export_environment(run_environment(flow_of(config.precision)))
    console = open_console()
    configure_logging()
    log = Path(config.output_dir) / config.name / "third_party.log"
    try:
        with quiet(log):
            model_path = resolve_model(config.model.path)
            check_partition(config, model_path)
            run = choose()
        run(config, model_path, quiet, console)
    except (MismatchError, NonFiniteError, OSError) as error:
        print(f"megatron-rl: the run failed: {error}", file=sys.stderr)
        return FAILED
    return 0
