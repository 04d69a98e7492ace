"""Metrics of a run: records, where they are written, and how a person sees them.

The run directory is the contract: everything here writes into it or reads from it, so a run can be
looked at while it runs, after a crash, and on another machine. ``metrics.mismatch`` is imported by
its own name, since it alone needs torch.
"""

from megatron_rl.metrics.console import Console
from megatron_rl.metrics.console_lines import RunHeader
from megatron_rl.metrics.evaluations import (
    AnswerPair,
    EvaluationChange,
    evaluation_changes,
    pair_answers,
)
from megatron_rl.metrics.files import RunWriteError
from megatron_rl.metrics.records import Metric, MetricAccumulator, reduce_metrics
from megatron_rl.metrics.rollouts import (
    Rollout,
    evaluation_path,
    list_rollouts,
    read_rollouts,
    rollouts_path,
    start_rollouts,
    write_rollouts,
)
from megatron_rl.metrics.writer import MetricsLine, MetricsWriter, read_metrics

__all__ = [
    "AnswerPair",
    "Console",
    "EvaluationChange",
    "Metric",
    "MetricAccumulator",
    "MetricsLine",
    "MetricsWriter",
    "Rollout",
    "RunHeader",
    "RunWriteError",
    "evaluation_changes",
    "evaluation_path",
    "list_rollouts",
    "pair_answers",
    "read_metrics",
    "read_rollouts",
    "reduce_metrics",
    "rollouts_path",
    "start_rollouts",
    "write_rollouts",
]
