"""How a plot looks: axes, curves, bands, legends, and their way to PNG and SVG.

Only matplotlib's object-oriented interface is used: no pyplot, no backend choice, no state between
plots. What the plots show is decided in ``charts``.
"""

import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, SymmetricalLogLocator

from megatron_rl.metrics.files import atomic_write
from megatron_rl.metrics.text import shorten
from megatron_rl.report.palette import CURVE_POINTS_FOR_AVERAGE, Palette, to_css_variables

FIGURE_INCHES = (4.8, 3.15)
PNG_DOTS_PER_INCH = 200
FONT_POINTS = 9.5
LEGEND_CHARACTERS = 50
MARKERS_UP_TO_POINTS = 40


def new_figure() -> Figure:
    """An empty figure in the report's proportions, whose layout keeps labels from touching."""
    layout = ConstrainedLayoutEngine(hspace=0.06)
    figure = Figure(figsize=FIGURE_INCHES, layout=layout)
    figure.set_facecolor("none")
    return figure


def style_axes(axes: Axes, palette: Palette, *, y_label: str, x_label: str | None = "step") -> None:
    """Sets labels, grid and frame; call it after drawing."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.muted)
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", colors=palette.muted, labelsize=FONT_POINTS, length=0, pad=4)
    axes.tick_params(axis="x", length=3, labelbottom=x_label is not None)
    axes.set_ylabel(y_label, color=palette.muted, fontsize=FONT_POINTS)
    if x_label:
        axes.set_xlabel(x_label, color=palette.muted, fontsize=FONT_POINTS)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    low, high = axes.get_xlim()
    if high - low < 2:  # a single step would otherwise get a scale of hundredths
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)


def percent_axis(axes: Axes) -> None:
    """Labels a vertical axis of shares in percent."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))


def logarithmic_axis(axes: Axes, values: Sequence[float]) -> None:
    """Whole decades on the vertical axis; zeros among the values keep a place at its foot.

    Args:
        axes: The axes.
        values: The finite, non-negative values drawn, at least one of them positive.
    """
    positive = [value for value in values if value > 0]
    low = 10.0 ** math.floor(math.log10(min(positive)))
    high = 10.0 ** math.ceil(math.log10(max(positive)) + 1e-9)
    if len(positive) == len(values):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    else:
        axes.set_yscale("symlog", linthresh=low, linscale=0.5)
        axes.set_ylim(-low / 4, high)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=low))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_legend(axes: Axes, palette: Palette) -> None:
    """Puts the legend above the axes, where it covers no data, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(len(label) for label in labels)
    axes.legend(
        handles,
        [shorten(label, LEGEND_CHARACTERS) for label in labels],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=3 if longest <= 16 else 2 if longest <= 24 else 1,
        frameon=False,
        fontsize=FONT_POINTS,
        labelcolor=palette.ink,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
    )


def draw_curve(
    axes: Axes,
    steps: Sequence[int],
    values: Sequence[float],
    *,
    colour: str,
    label: str,
    dashed: bool = False,
    marker: str = "o",
) -> None:
    """Draws values over steps; a long noisy curve is drawn faint under its running mean.

    NaN and infinite values leave a gap.
    """
    values = finite_or_gap(values).tolist()
    style = "--" if dashed else "-"
    if len(values) > CURVE_POINTS_FOR_AVERAGE:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
        smooth = running_mean(values, max(1, len(values) // 50))
        axes.plot(steps, smooth, style, color=colour, linewidth=2.0, label=label)
        return
    shown = marker if len(values) <= MARKERS_UP_TO_POINTS else ""
    axes.plot(
        steps, values, style, color=colour, linewidth=1.8, marker=shown, markersize=4, label=label
    )


def finite_or_gap(values: Iterable[float]) -> np.ndarray:
    """Values as a float64 array in which infinities are NaN, which matplotlib leaves out."""
    array = np.fromiter(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value with up to ``reach`` values on both sides, of those that are finite."""
    means = []
    for index in range(len(values)):
        near = values[max(0, index - reach) : index + reach + 1]
        finite = [value for value in near if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def draw_nothing(figure: Figure, palette: Palette, reason: str) -> None:
    """Fills a plot without data with the reason."""
    figure.text(
        0.5, 0.5, reason, ha="center", va="center", color=palette.muted, fontsize=FONT_POINTS + 1
    )


def write_png(figure: Figure, path: Path, palette: Palette, title: str) -> None:
    """Writes a figure with its title as a PNG file.

    Raises:
        RunWriteError: The file cannot be written.
    """
    figure.suptitle(
        title, x=0.01, ha="left", color=palette.ink, fontsize=FONT_POINTS + 2, fontweight="bold"
    )
    figure.set_facecolor(palette.surface)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=PNG_DOTS_PER_INCH)
    atomic_write(path, buffer.getvalue())


def to_inline_svg(figure: Figure, *, name: str, description: str) -> str:
    """Renders a figure drawn in placeholder colours as an SVG element for the page.

    Args:
        figure: The figure; its title stands on the page, not in the plot.
        name: Prefix of the element ids, unique on the page.
        description: What the plot shows, for screen readers; plain text.

    Returns:
        ``<svg ...>`` that scales to its container and takes its colours from CSS variables.
    """
    buffer = io.StringIO()
    # Text stays text: it is small, searchable, and takes the page's font.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_figure(
            buffer, format="svg", metadata={"Date": None, "Creator": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: (\d+(?:\.\d+)?)px [^;\"]*", r"font-size: \1px", svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box
    opening = f'<svg {view_box[0]} role="img" aria-label="{html.escape(description)}">'
    svg = opening + svg[svg.index(">") + 1 :]
    return to_css_variables(svg)
