"""What the plots of one run show.

Each chart is a name, a title that says what is measured, and a function that draws it on an empty
figure and says whether there was anything to draw.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.metrics.evaluations import EVALUATION_KEY
from megatron_rl.report.drawing import (
    FONT_POINTS,
    draw_curve,
    draw_legend,
    finite_or_gap,
    logarithmic_axis,
    new_figure,
    percent_axis,
    style_axes,
)
from megatron_rl.report.load import RunData
from megatron_rl.report.palette import Palette

MAX_TIMING_BARS = 50
PHASES = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "policy log-probs",
    "ref": "ref log-probs",
    "update_actor": "update",
    "sync": "weight sync",
    "eval": "evaluation",
    "save": "checkpoint",
}
"""Phases of a step in order: metric key to what people call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One plot of a run."""

    name: str
    """Name of the PNG file, without its suffix."""
    title: str
    """What is measured."""
    caption: str
    """How to read it, in a sentence."""
    draw: Callable[[Figure, RunData, Palette], bool]
    """Draws on an empty figure; returns whether the run had data for it."""


def figure_of(chart: Chart, run: RunData, palette: Palette) -> Figure | None:
    """Draws a chart; ``None`` when the run has no data for it."""
    figure = new_figure()
    return figure if chart.draw(figure, run, palette) else None


def _held_out_keys(run: RunData, measure: str) -> dict[str, str]:
    """Keys of held-out ``acc`` or ``reward`` with their legend labels, greedy first."""
    keys = {key for metrics in run.table.values() for key in metrics}
    matches = [match for key in keys if (match := EVALUATION_KEY.fullmatch(key))]
    chosen = [match for match in matches if match["measure"] == measure]
    sources = {match["source"] for match in chosen}
    labels = {}
    for match in sorted(chosen, key=lambda item: (int(item["samples"] or 0), item["source"])):
        decoding = f"mean@{match['samples']}" if match["samples"] else "greedy"
        source = f"{match['source']}, " if len(sources) > 1 else ""
        labels[match[0]] = f"held-out ({source}{decoding})"
    return labels


def _draw_held_out(axes: Axes, run: RunData, palette: Palette, measure: str) -> bool:
    keys = _held_out_keys(run, measure)
    for index, (key, label) in enumerate(keys.items()):
        colour = palette.series[1 + index % (len(palette.series) - 1)]
        draw_curve(
            axes, *run.series(key), colour=colour, label=label, dashed="@" in key, marker="D"
        )
    return bool(keys)


def _draw_reward(figure: Figure, run: RunData, palette: Palette) -> bool:
    axes = figure.subplots()
    steps, means = run.series("critic/rewards/mean")
    spread_steps, spreads = run.series("critic/rewards/std")
    if steps and spread_steps == steps:
        low, high = _spread_band(run, means, spreads)
        axes.fill_between(
            steps, low, high, color=palette.series[0], alpha=0.13, linewidth=0, label="± 1 std"
        )
    if steps:
        draw_curve(axes, steps, means, colour=palette.series[0], label="training samples")
    has_held_out = _draw_held_out(axes, run, palette, "reward")
    style_axes(axes, palette, y_label="reward")
    if steps or has_held_out:
        draw_legend(axes, palette)
    return bool(steps) or has_held_out


def _spread_band(run: RunData, means: list[float], spreads: list[float]) -> np.ndarray:
    """Mean minus and plus one standard deviation ``[2, num_steps]``, within the rewards seen."""
    centre, std = finite_or_gap(means), finite_or_gap(spreads)
    lowest = min(filter(math.isfinite, run.series("critic/rewards/min")[1]), default=-math.inf)
    highest = max(filter(math.isfinite, run.series("critic/rewards/max")[1]), default=math.inf)
    return np.clip(np.stack([centre - std, centre + std]), lowest, highest)


def _draw_accuracy(figure: Figure, run: RunData, palette: Palette) -> bool:
    axes = figure.subplots()
    steps, values = run.series("train/accuracy")
    if steps:
        draw_curve(axes, steps, values, colour=palette.series[0], label="training samples")
    has_held_out = _draw_held_out(axes, run, palette, "acc")
    axes.set_ylim(bottom=0.0)
    percent_axis(axes)
    style_axes(axes, palette, y_label="exact match")
    if steps or has_held_out:
        draw_legend(axes, palette)
    return bool(steps) or has_held_out


def _draw_mismatch(figure: Figure, run: RunData, palette: Palette) -> bool:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    curves = {
        label: run.series(f"rollout_corr/logp_diff_abs_{key}")
        for key, label in (("mean", "mean"), ("max", "max"))
    }
    for index, (label, (steps, values)) in enumerate(curves.items()):
        if steps:
            draw_curve(
                upper, steps, values, colour=palette.series[index], label=label, dashed=index > 0
            )
    values = [value for _, series in curves.values() for value in series if math.isfinite(value)]
    steps, shares = run.series("rollout_corr/exact_share")
    if steps:
        draw_curve(lower, steps, shares, colour=palette.series[2], label="exactly equal")
    lower.set_ylim(-0.05, 1.05)
    percent_axis(lower)
    style_axes(upper, palette, y_label="|Δ log p| (nats)", x_label=None)
    style_axes(lower, palette, y_label="exactly equal")
    _scale_mismatch(upper, values, palette)
    figure.align_ylabels([upper, lower])
    if values:
        draw_legend(upper, palette)
    return bool(values or steps)


def _scale_mismatch(axes: Axes, values: list[float], palette: Palette) -> None:
    """Logarithmic where values are positive; zeros, the goal, keep a place on the axis."""
    positive = [value for value in values if value > 0]
    if values and not positive:
        axes.set_ylim(-0.1, 1.0)
        axes.set_yticks([0.0], labels=["0"])
        axes.text(
            0.5,
            0.5,
            "0 at every step: bit for bit equal",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=palette.muted,
            fontsize=FONT_POINTS,
        )
    elif positive:
        logarithmic_axis(axes, values)


def _draw_timing(figure: Figure, run: RunData, palette: Palette) -> bool:
    axes = figure.subplots()
    table = {step: metrics for step, metrics in run.table.items() if step > 0}
    phases = [
        phase for phase in PHASES if any(f"timing_s/{phase}" in row for row in table.values())
    ]
    steps = list(table)
    size = max(1, math.ceil(len(steps) / MAX_TIMING_BARS))
    bins = [steps[start : start + size] for start in range(0, len(steps), size)]
    centres = [sum(part) / len(part) for part in bins]
    bottoms = [0.0] * len(bins)
    for phase in phases:
        key = f"timing_s/{phase}"
        heights = [
            np.nan_to_num(finite_or_gap(table[step].get(key, 0.0) for step in part)).mean()
            for part in bins
        ]
        colour = palette.series[list(PHASES).index(phase)]
        axes.bar(
            centres,
            heights,
            bottom=bottoms,
            width=0.86 * size,
            color=colour,
            edgecolor=palette.surface,
            linewidth=0.4,
            label=PHASES[phase],
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    style_axes(axes, palette, y_label="seconds per step")
    if phases:
        draw_legend(axes, palette)
    return bool(phases)


def _draw_loss(figure: Figure, run: RunData, palette: Palette) -> bool:
    panels = {
        "actor/pg_loss": "policy\nloss",
        "actor/entropy": "entropy\n(nats)",
        "actor/grad_norm": "gradient\nnorm",
    }
    all_axes = figure.subplots(len(panels), 1, sharex=True)
    has_data = False
    for index, (axes, (key, label)) in enumerate(zip(all_axes, panels.items(), strict=True)):
        steps, values = run.series(key)
        if steps:
            has_data = True
            draw_curve(axes, steps, values, colour=palette.series[index], label=label)
        style_axes(
            axes, palette, y_label=label, x_label="step" if index == len(panels) - 1 else None
        )
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        axes.margins(y=0.15)
    figure.align_ylabels(all_axes)
    return has_data


def _draw_lengths(figure: Figure, run: RunData, palette: Palette) -> bool:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps, means = run.series("response_length/mean")
    low_steps, lows = run.series("response_length/min")
    high_steps, highs = run.series("response_length/max")
    if steps and low_steps == high_steps == steps:
        upper.fill_between(
            steps,
            finite_or_gap(lows),
            finite_or_gap(highs),
            color=palette.series[0],
            alpha=0.13,
            linewidth=0,
            label="shortest to longest",
        )
    if steps:
        draw_curve(upper, steps, means, colour=palette.series[0], label="mean response")
    upper.set_ylim(bottom=0)
    cut_steps, cut = run.series("response_length/clip_ratio")
    if cut_steps:
        draw_curve(lower, cut_steps, cut, colour=palette.series[1], label="truncated")
    lower.set_ylim(0.0, max(0.05, 1.15 * np.nanmax(finite_or_gap(cut), initial=0.0)))
    percent_axis(lower)
    lower.yaxis.set_major_locator(MaxNLocator(nbins=3))
    style_axes(upper, palette, y_label="tokens", x_label=None)
    style_axes(lower, palette, y_label="truncated")
    figure.align_ylabels([upper, lower])
    if steps:
        draw_legend(upper, palette)
    return bool(steps)


CHARTS = (
    Chart(
        name="reward",
        title="Reward",
        caption="Mean reward of the sampled responses of each step, and of held-out prompts.",
        draw=_draw_reward,
    ),
    Chart(
        name="accuracy",
        title="Exact-match accuracy",
        caption="Share of right answers among sampled training responses and on held-out prompts.",
        draw=_draw_accuracy,
    ),
    Chart(
        name="mismatch",
        title="Rollout and training log-probs: difference",
        caption="Per sampled token: how far the trainer's log-prob is from the rollout's.",
        draw=_draw_mismatch,
    ),
    Chart(
        name="lengths",
        title="Response length",
        caption="Tokens of a response, and the share that was cut at the length limit.",
        draw=_draw_lengths,
    ),
    Chart(
        name="loss",
        title="Policy loss, entropy, gradient norm",
        caption="On policy the loss is near zero by construction; entropy tells of exploration.",
        draw=_draw_loss,
    ),
    Chart(
        name="timing",
        title="Where a step's time goes",
        caption="Seconds of each phase of a step.",
        draw=_draw_timing,
    ),
)
"""The charts in the order of the page."""
