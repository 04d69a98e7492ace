"""One run from configuration to report: prepare, resume, train, export.

The caller has set the environment (threads, vLLM's and the flow's variables) before this module is
imported.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.config import RunConfig
from megatron_rl.config.sft import SFTConfig
from megatron_rl.metrics import Console, MetricsWriter, RunHeader, read_metrics, start_rollouts
from megatron_rl.metrics.console_lines import COLUMNS, SFT_COLUMNS, Column
from megatron_rl.policy import parallel
from megatron_rl.policy.checkpoint import load_checkpoint
from megatron_rl.policy.checkpoint_files import checkpoint_path, newest_step, read_manifest
from megatron_rl.policy.errors import NonFiniteError
from megatron_rl.policy.parallel import ParallelLayout
from megatron_rl.trainer.components import Inputs, RunParts, build_components, load_inputs
from megatron_rl.trainer.flow_status import FlowStatus, flow_status
from megatron_rl.trainer.loop import TrainerState, train
from megatron_rl.trainer.perfectible import with_perfectible_prompts
from megatron_rl.trainer.recorder import RunRecorder
from megatron_rl.trainer.run_directory import prepare_run_directory, run_directory
from megatron_rl.trainer.sft import build_sft_components, fine_tune, load_sft_inputs

logger = logging.getLogger(__name__)

Quiet = Callable[[Path], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a kind of run does between opening and closing its directory."""

    load_inputs: Callable[[Any, Path], Inputs]
    build_components: Callable[[Any, Inputs, ParallelLayout], RunParts]
    train: Callable[[Any, TrainerState, RunRecorder], None]
    describe_steps: Callable[[Any], str]
    """What the steps are, for the header."""
    columns: Sequence[Column]
    """Columns of a step's line on the console."""


def run_training(config: RunConfig, model_path: Path, quiet: Quiet, console_file: TextIO) -> Path:
    """Trains with reinforcement learning; see :func:`run_stages`."""
    stages = Stages(
        load_inputs=load_inputs,
        build_components=build_components,
        train=train,
        describe_steps=lambda config: (
            f"{config.trainer.total_steps} of {config.data.train_batch_size} prompts x "
            f"{config.rollout.n} samples"
        ),
        columns=COLUMNS,
    )
    return run_stages(stages, config, model_path, quiet, console_file)


def run_fine_tuning(
    config: SFTConfig, model_path: Path, quiet: Quiet, console_file: TextIO
) -> Path:
    """Fine-tunes with supervision; see :func:`run_stages`."""
    stages = Stages(
        load_inputs=load_sft_inputs,
        build_components=build_sft_components,
        train=fine_tune,
        describe_steps=lambda config: (
            f"{config.trainer.total_steps} of {config.data.batch_size_sequences} sequences"
        ),
        columns=SFT_COLUMNS,
    )
    return run_stages(stages, config, model_path, quiet, console_file)


def run_stages(
    stages: Stages,
    config: RunConfig | SFTConfig,
    model_path: Path,
    quiet: Quiet,
    console_file: TextIO,
) -> Path:
    """Trains, and returns the run directory.

    Args:
        stages: What kind of run it is.
        config: The run.
        model_path: Hugging Face directory of the starting policy.
        quiet: Context manager that sends standard output and error to a file.
        console_file: The console, which ``quiet`` leaves alone.

    Raises:
        ValueError: Something about the input is wrong.
        NonFiniteError: The run diverged.
        MismatchError: Rollout and training differ, and ``precision.gate=stop``.
        OSError: The run directory could not be written.
    """
    run_dir = run_directory(config)
    resume_from = find_resume(config, run_dir)
    inputs = stages.load_inputs(config, model_path)
    status = flow_status(config, inputs.flow, inputs.spec)
    if os.environ.get("RANK", "0") == "0":
        prepare_run_directory(run_dir, config, status)
    start_step = 0 if resume_from is None else int(read_manifest(resume_from)["step"])
    resume_step = None if resume_from is None else start_step
    with quiet(run_dir / "third_party.log"):
        layout = parallel.initialize(
            config.policy, config.seed, timeout_s=config.trainer.collective_timeout_s
        )
    is_writer = layout.rank == 0
    writer = MetricsWriter(run_dir, config.logging, resume_step=resume_step) if is_writer else None
    if is_writer:
        start_rollouts(run_dir, resume_step=resume_step)
    console = Console(
        total_steps=config.trainer.total_steps,
        file=console_file,
        before=_metrics_before(run_dir, resume_step),
        columns=stages.columns,
    )
    if is_writer:
        steps = stages.describe_steps(config)
        console.header(_header(config, inputs, status, steps, run_dir, resume_from))
    with quiet(run_dir / "third_party.log"):
        parts = stages.build_components(config, inputs, layout)
    try:
        with quiet(run_dir / "third_party.log"):
            parts = with_perfectible_prompts(
                parts, run_dir, is_resumed=resume_from is not None, tell=console.message
            )
        state = TrainerState()
        if resume_from is not None:
            trainer = load_checkpoint(resume_from, parts.policy)
            parts.loader.load_state_dict(trainer["loader"])
            state.step = int(trainer["step"])
        recorder = RunRecorder(parts, run_dir, writer, console)
        with quiet(run_dir / "third_party.log"):
            try:
                stages.train(parts, state, recorder)
            except NonFiniteError:
                # It reaches every rank alike, so they can still complete a save in flight.
                recorder.finish()
                raise
            recorder.finish()
            if config.trainer.export_hf:
                recorder.export()
        report = None
        if is_writer and config.logging.report:
            from megatron_rl.report import build_report

            report = build_report(run_dir)
        if is_writer:
            console.summary(run_dir, report=report)
    finally:
        _close(parts, writer)
    return run_dir


def find_resume(config: RunConfig | SFTConfig, run_dir: Path) -> Path | None:
    """The checkpoint that this run continues from, or None for a fresh start.

    Raises:
        ValueError: The run directory holds checkpoints that a fresh start would bury, or
            ``resume_path`` is no complete checkpoint.
    """
    trainer = config.trainer
    if trainer.resume_mode == "path":
        assert trainer.resume_path is not None
        directory = Path(trainer.resume_path)
        read_manifest(directory)
        return directory
    root = run_dir / "checkpoints"
    step = newest_step(root)
    if step is None:
        return None
    if trainer.resume_mode == "disable":
        raise ValueError(
            f"{root} holds checkpoints of an earlier run and trainer.resume_mode=disable would "
            "write over them; choose another name, delete the directory, or set "
            "trainer.resume_mode=auto"
        )
    return checkpoint_path(root, step)


def _metrics_before(run_dir: Path, resume_step: int | None) -> dict[str, float]:
    """The evaluation before training, which a resumed run compares with."""
    if resume_step is None:
        return {}
    merged: dict[str, float] = {}
    for line in read_metrics(run_dir):
        if line.step == 0:
            merged |= line.metrics
    return merged


def _header(
    config: RunConfig | SFTConfig,
    inputs: Inputs,
    status: FlowStatus,
    steps: str,
    run_dir: Path,
    resume_from: Path | None,
) -> RunHeader:
    spec = inputs.spec
    extra: dict[str, str] = {}
    if resume_from is not None:
        extra["resumed"] = f"from {resume_from}"
    return RunHeader(
        name=config.name,
        model=f"{config.model.path} ({spec.architecture}, {spec.num_layers} layers of "
        f"{spec.hidden_size})",
        flow=status.header(),
        data=f"{len(inputs.train_prompts)} training and {len(inputs.val_prompts)} held-out prompts",
        steps=steps,
        run_dir=run_dir,
        extra=extra,
    )


def _close(parts: RunParts, writer: MetricsWriter | None) -> None:
    actions: list[Callable[[], Any]] = [parts.inputs.rewards.close]
    if parts.engine is not None:
        actions.insert(0, parts.engine.close)
    if writer is not None:
        actions.append(writer.close)
    actions.append(parallel.shutdown)
    for action in actions:
        try:
            action()
        except Exception:
            # A fault while closing must not hide the error, or the result, of the run itself.
            logger.warning("%s failed", action, exc_info=True)
