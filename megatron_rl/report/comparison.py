"""What a comparison of runs shows: a few curves, one per run, and a row of results each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from megatron_rl.metrics.text import format_duration, format_number
from megatron_rl.report import view
from megatron_rl.report.drawing import (
    draw_curve,
    draw_legend,
    logarithmic_axis,
    new_figure,
    percent_axis,
    style_axes,
)
from megatron_rl.report.load import RunData
from megatron_rl.report.palette import Palette

MARKERS = "osD^vPX*"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonChart:
    """A plot with one curve per run."""

    name: str
    title: str
    caption: str
    key: str
    """Metric key; one that ends in ``*`` takes the mean of the greedy held-out keys that match."""
    y_label: str
    percent: bool = False


COMPARISON_CHARTS = (
    ComparisonChart(
        name="accuracy",
        title="Held-out accuracy",
        caption="Greedy exact match on held-out prompts, mean of the held-out sets.",
        key="val-core/*/acc/mean",
        y_label="exact match",
        percent=True,
    ),
    ComparisonChart(
        name="reward",
        title="Training reward",
        caption="Mean reward of the sampled responses of each step.",
        key="critic/rewards/mean",
        y_label="reward",
    ),
    ComparisonChart(
        name="mismatch",
        title="Rollout and training log-probs: difference",
        caption="Mean absolute difference per sampled token; 0 is bit for bit equal.",
        key="rollout_corr/logp_diff_abs_mean",
        y_label="|Δ log p| (nats)",
    ),
    ComparisonChart(
        name="entropy",
        title="Entropy",
        caption="Mean entropy of the policy's next-token distribution.",
        key="actor/entropy",
        y_label="nats",
    ),
    ComparisonChart(
        name="lengths",
        title="Response length",
        caption="Mean tokens of a response.",
        key="response_length/mean",
        y_label="tokens",
    ),
    ComparisonChart(
        name="time",
        title="Time per step",
        caption="Seconds from rollout to update.",
        key="perf/time_per_step",
        y_label="seconds",
    ),
)


def comparison_figure(
    chart: ComparisonChart, runs: Mapping[str, RunData], palette: Palette
) -> Figure | None:
    """Draws one curve per run, in the order of ``runs``; ``None`` when no run has data."""
    figure = new_figure()
    axes = figure.subplots()
    drawn: list[float] = []
    for index, (name, run) in enumerate(runs.items()):
        steps, values = _series(run, chart.key)
        if steps:
            draw_curve(
                axes,
                steps,
                values,
                colour=palette.series[index],
                label=name,
                marker=MARKERS[index],
            )
            drawn += [value for value in values if math.isfinite(value)]
    style_axes(axes, palette, y_label=chart.y_label)
    if chart.percent:
        axes.set_ylim(bottom=0.0)
        percent_axis(axes)
    if chart.name == "mismatch" and any(value > 0 for value in drawn):
        logarithmic_axis(axes, drawn)
    if drawn:
        draw_legend(axes, palette)
    return figure if drawn else None


def _series(run: RunData, key: str) -> tuple[list[int], list[float]]:
    if "*" not in key:
        return run.series(key)
    start, _, end = key.partition("*")
    means = {}
    for step, metrics in run.table.items():
        values = [
            value
            for name, value in metrics.items()
            if name.startswith(start) and name.endswith(end)
        ]
        if values:
            means[step] = sum(values) / len(values)
    return list(means), list(means.values())


def row_of(run: RunData) -> dict[str, str]:
    """The results of a run by column head."""
    measure, before, after = view.headline_change(run) or ("", None, None)
    facts = dict(view.facts_of(run))
    return {
        "status": view.status_of(run)[1],
        "model": facts.get("Model", "-"),
        "flow": str(run.environment.get("flow") or run.setting("precision.flow") or "-"),
        "held-out": {"acc": "exact match", "reward": "reward"}.get(measure, "-"),
        "before": view.show_measure(measure, before),
        "after": view.show_measure(measure, after),
        "|Δ log p|": format_number(run.mean("rollout_corr/logp_diff_abs_mean")),
        "equal": view.format_share(run.mean("rollout_corr/exact_share")),
        "time": format_duration(run.wall_time_s),
    }
