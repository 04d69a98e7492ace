"""Writes what a run produces: metrics, rollouts, checkpoints, the exported policy.

Only rank 0 writes, except checkpoints, which every rank takes part in.
"""

import shutil
from pathlib import Path

from checkpoints_tools.hf import HFReader, write_hf_directory
from megatron_rl.metrics import (
    Console,
    MetricsWriter,
    evaluation_path,
    rollouts_path,
    write_rollouts,
)
from megatron_rl.metrics.gate import GateFinding, append_finding
from megatron_rl.policy.checkpoint import save_checkpoint
from megatron_rl.policy.checkpoint_async import BackgroundSaver
from megatron_rl.trainer.batch import RolloutBatch
from megatron_rl.trainer.components import RunParts
from megatron_rl.trainer.evaluation import Evaluation, rollout_record
from megatron_rl.trainer.run_directory import check_free_space

BYTES_PER_PARAMETER = 16
"""Room that a checkpoint needs: parameters, FP32 master weights and two moments, with a margin."""


class RunRecorder:
    """The recorder of a run; see :class:`megatron_rl.trainer.loop.Recorder`."""

    def __init__(
        self, parts: RunParts, run_dir: Path, writer: MetricsWriter | None, console: Console
    ) -> None:
        """Records into ``run_dir``; ``writer`` is None on ranks that do not write."""
        self._parts = parts
        self._run_dir = run_dir
        self._writer = writer
        self._console = console
        self._saver = BackgroundSaver() if parts.config.trainer.async_save else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records a training step that has no rollouts."""
        if self._saver is not None:
            self._saver.poll()
        if self._writer is None:
            return
        self._writer.log(step, metrics)
        self._console.step(step, metrics)

    def step(
        self, step: int, metrics: dict[str, float], batch: RolloutBatch, texts: list[str]
    ) -> None:
        """Records one training step."""
        self.log(step, metrics)
        if self._writer is None:
            return
        count = min(self._parts.config.logging.rollout_samples, len(texts))
        if not count:
            return
        # Evenly spaced, not the best: a sample of the batch.
        rows = [index * len(texts) // count for index in range(count)]
        rollouts = [
            rollout_record(
                step,
                batch.prompts[batch.completions[row].prompt_index],
                batch.completions[row],
                texts[row],
                batch.rewards[row],
                advantage=batch.advantages.values[row].item(),
            )
            for row in rows
        ]
        write_rollouts(rollouts_path(self._run_dir, step), rollouts)

    def gate(self, finding: GateFinding) -> None:
        """Records what the mismatch gate found, and shows it where it is a warning."""
        if self._writer is None:
            return
        append_finding(self._run_dir, finding)
        if not finding.is_within:
            self._console.message(finding.message())

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Records one evaluation."""
        if self._writer is None:
            return
        self._writer.log(step, evaluation.metrics)
        self._console.evaluation(step, evaluation.metrics)
        write_rollouts(evaluation_path(self._run_dir, step), evaluation.rollouts)

    def save(self, step: int) -> None:
        """Saves a resumable checkpoint, or starts to with ``trainer.async_save``.

        Raises:
            OSError: This checkpoint, or one begun before, could not be written.
        """
        self.finish()
        parts = self._parts
        root = self._run_dir / "checkpoints"
        root.mkdir(parents=True, exist_ok=True)
        parameters = sum(p.numel() for p in parts.policy.model.parameters())
        check_free_space(root, parameters * BYTES_PER_PARAMETER, "a checkpoint")
        save = save_checkpoint if self._saver is None else self._saver.start
        save(
            root,
            step,
            parts.policy,
            {"step": step, "loader": parts.loader.state_dict()},
            keep=parts.config.trainer.keep_checkpoints,
        )

    def finish(self) -> None:
        """Waits for a checkpoint that is written in the background, if there is one.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._saver is not None:
            self._saver.finish()

    def export(self) -> Path | None:
        """Writes the policy as a Hugging Face directory."""
        if self._writer is None:
            for _ in self._parts.policy.named_tensors():
                pass  # gathering is a collective: every rank takes part, one writes
            return None
        target = self._run_dir / "hf"
        inputs = self._parts.inputs
        parameters = self._parts.policy.model.parameters()
        num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        check_free_space(self._run_dir, num_bytes, "the exported policy")
        shutil.rmtree(target, ignore_errors=True)
        config = dict(HFReader(inputs.model_path).config)
        config.pop("torch_dtype", None)
        config["dtype"] = inputs.flow.compute_dtype
        write_hf_directory(
            target,
            hf_config=config,
            tensors=self._parts.policy.named_tensors(),
            assets_from=inputs.model_path,
        )
        return target
