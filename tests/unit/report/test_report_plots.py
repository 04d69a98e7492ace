import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import LoggingConfig
from megatron_rl.metrics import MetricsWriter
from megatron_rl.report.charts import CHARTS, MAX_TIMING_BARS, figure_of
from megatron_rl.report.drawing import running_mean, to_inline_svg
from megatron_rl.report.load import load_run
from megatron_rl.report.palette import PAPER, PLACEHOLDERS, SERIES_NAMES
from megatron_rl.report.view import format_share

BY_NAME = {chart.name: chart for chart in CHARTS}


def run_of(run_dir, table):
    with MetricsWriter(run_dir, LoggingConfig(), resume_step=None) as writer:
        for step, metrics in table.items():
            writer.log(step, metrics)
    return load_run(run_dir)


def line_data(figure, axes_index, line_index):
    line = figure.axes[axes_index].get_lines()[line_index]
    return list(line.get_xdata()), list(line.get_ydata())


@pytest.mark.parametrize(
    ("chart", "axes", "line", "key"),
    [
        ("reward", 0, 0, "critic/rewards/mean"),
        ("reward", 0, 1, "val-core/chain_sum/reward/mean"),
        ("accuracy", 0, 0, "train/accuracy"),
        ("accuracy", 0, 1, "val-core/chain_sum/acc/mean"),
        ("mismatch", 0, 0, "rollout_corr/logp_diff_abs_mean"),
        ("mismatch", 0, 1, "rollout_corr/logp_diff_abs_max"),
        ("mismatch", 1, 0, "rollout_corr/exact_share"),
        ("lengths", 0, 0, "response_length/mean"),
        ("lengths", 1, 0, "response_length/clip_ratio"),
        ("loss", 0, 0, "actor/pg_loss"),
        ("loss", 1, 0, "actor/entropy"),
        ("loss", 2, 0, "actor/grad_norm"),
    ],
)
def test_curves_hold_the_recorded_values(shared_run, chart, axes, line, key):
    run = load_run(shared_run(mismatch=1e-3))
    figure = figure_of(BY_NAME[chart], run, PAPER)
    assert line_data(figure, axes, line) == tuple(run.series(key))


@pytest.mark.parametrize("steps", [1, 20, 49, 51, 173])
def test_time_bars_add_up_to_the_recorded_time(tmp_path, steps):
    table = {
        step: {"timing_s/gen": 1.0 + step, "timing_s/update_actor": 2.0, "timing_s/step": 9.0}
        | ({"timing_s/eval": 7.0} if step % 10 == 0 else {})
        for step in range(1, steps + 1)
    }
    run = run_of(tmp_path, table)
    (axes,) = figure_of(BY_NAME["timing"], run, PAPER).axes
    phases = len(axes.containers)
    assert phases == 2 + (steps >= 10)
    bars = len(axes.containers[0])
    assert bars <= MAX_TIMING_BARS
    size = math.ceil(steps / bars)
    for index, (phase, seconds) in enumerate(
        {"gen": sum(1.0 + step for step in table), "update_actor": 2.0 * steps}.items()
    ):
        drawn = [bar.get_height() for bar in axes.containers[index]]
        weights = [min(size, steps - size * number) for number in range(bars)]
        total = sum(height * weight for height, weight in zip(drawn, weights, strict=True))
        assert total == pytest.approx(seconds), phase


@pytest.mark.parametrize(
    ("values", "scale"),
    [([0.0] * 3, "linear"), ([1e-4, 2e-3, 1e-3], "log"), ([0.0, 1e-4, 2e-3], "symlog")],
)
def test_zero_mismatch_is_visible_on_every_scale(tmp_path, values, scale):
    table = {
        step: {"rollout_corr/logp_diff_abs_mean": value, "rollout_corr/logp_diff_abs_max": value}
        for step, value in enumerate(values, start=1)
    }
    figure = figure_of(BY_NAME["mismatch"], run_of(tmp_path, table), PAPER)
    upper = figure.axes[0]
    assert upper.get_yscale() == scale
    low, high = upper.get_ylim()
    assert all(low <= value <= high for value in values)
    told = any("bit for bit equal" in text.get_text() for text in upper.texts)
    assert told == (scale == "linear")


def test_the_reward_band_stays_within_the_rewards(shared_run):
    figure = figure_of(BY_NAME["reward"], load_run(shared_run()), PAPER)
    (band,) = figure.axes[0].collections
    extent = band.get_paths()[0].get_extents()
    assert 0.0 <= extent.y0 <= extent.y1 <= 1.0


def overlaps(boxes):
    return [
        (one, other)
        for index, one in enumerate(boxes)
        for other in boxes[index + 1 :]
        if one[1].overlaps(other[1])
    ]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
@pytest.mark.parametrize(
    "options",
    [{}, {"mismatch": 1e-3}, {"steps": 150}, {"steps": 1, "planned_steps": 20}],
    ids=["exact", "mismatch", "long", "one-step"],
)
def test_labels_neither_overlap_nor_leave_the_picture(shared_run, chart, options):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(chart, load_run(shared_run(**options)), PAPER)
    FigureCanvasAgg(figure).draw()
    width, height = figure.bbox.width, figure.bbox.height
    texts = []
    for axes in figure.axes:
        (low_x, high_x), (low_y, high_y) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
        found = [axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += [t for t in axes.get_xticklabels() if low_x <= t.get_position()[0] <= high_x]
        found += [t for t in axes.get_yticklabels() if low_y <= t.get_position()[1] <= high_y]
        if legend := axes.get_legend():
            found += legend.get_texts()
        texts += [text for text in found if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    assert overlaps(boxes) == []
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= width and box.y1 <= height, text


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_inline_svg_is_well_formed_and_scales(shared_run, chart):
    figure = figure_of(chart, load_run(shared_run()), PLACEHOLDERS)
    svg = to_inline_svg(figure, name=chart.name, description=chart.caption)
    (root,) = ElementTree.fromstring(f'<page xmlns:xlink="x">{svg}</page>')
    assert "width" not in root.attrib
    assert root.attrib["aria-label"] == chart.caption
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert all(identity.startswith(f"{chart.name}-") for identity in ids)


def test_charts_of_runs_without_data_are_none(tmp_path):
    run = run_of(tmp_path, {1: {"something/else": 1.0}})
    assert [figure_of(chart, run, PAPER) for chart in CHARTS] == [None] * len(CHARTS)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.integers(0, 10))
def test_running_mean_is_the_mean_of_the_neighbours(values, reach):
    means = running_mean(values, reach)
    assert len(means) == len(values)
    for index, mean in enumerate(means):
        near = [value for other, value in enumerate(values) if abs(other - index) <= reach]
        assert mean == pytest.approx(sum(near) / len(near), abs=1e-9)


def luminance(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_in_light_and_dark():
    """WCAG AA: 4.5 for text, 3 for curves of the colours that curves use first."""
    import re
    from importlib.resources import files

    css = files("megatron_rl.report").joinpath("report.css").read_text()
    light_css, rest = css.split("@media (prefers-color-scheme: dark)", 1)
    for block in (light_css, rest.split("}", 1)[0]):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for text in ("ink", "muted", "accent", "good", "bad"):
            for surface in ("page", "surface"):
                assert contrast(colours[text], colours[surface]) >= 4.5, (text, surface)
        assert contrast(colours["good"], colours["good-tint"]) >= 4.5
        assert contrast(colours["bad"], colours["bad-tint"]) >= 4.5
        for text in ("plot-ink", "plot-muted"):
            assert contrast(colours[text], colours["plot-surface"]) >= 4.5
        for name in SERIES_NAMES[:4]:
            assert contrast(colours[f"plot-{name}"], colours["plot-surface"]) >= 3.0, name


@pytest.mark.parametrize(
    ("share", "shown"),
    [(1.0, "100%"), (1 - 1e-9, ">99.9%"), (0.9994, "99.9%"), (0.0, "0.0%"), (None, "-")],
)
def test_only_all_is_shown_as_all(share, shown):
    assert format_share(share) == shown
