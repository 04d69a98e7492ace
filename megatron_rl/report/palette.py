"""The colours of the plots, on paper and on the page.

Series colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/), which stay apart under the
common colour vision deficiencies. On the page each is a CSS variable with a lighter twin for dark
mode: plots are drawn once in placeholder colours, which :func:`to_css_variables` replaces, so that
one SVG is right in both modes.
"""

from dataclasses import dataclass

CURVE_POINTS_FOR_AVERAGE = 60
"""A curve with more points is drawn faint under its running mean."""
SERIES_NAMES = ("blue", "vermillion", "green", "purple", "orange", "sky", "yellow", "grey")


@dataclass(frozen=True, kw_only=True, slots=True)
class Palette:
    """Colours of one plot, as ``#rrggbb``."""

    ink: str
    """Text."""
    muted: str
    """Tick labels, axis labels and frames."""
    grid: str
    """Grid lines."""
    surface: str
    """Background, and the edge between stacked bars."""
    series: tuple[str, ...]
    """Colours of curves, in the order of ``SERIES_NAMES``."""


PAPER = Palette(
    ink="#1c2128",
    muted="#59636e",
    grid="#dfe3e8",
    surface="#ffffff",
    series=(
        "#0072b2",
        "#d55e00",
        "#009e73",
        "#b5558f",
        "#e69f00",
        "#56b4e9",
        "#d4c400",
        "#8b949e",
    ),
)
"""For PNG files: dark on white."""

PLACEHOLDERS = Palette(
    ink="#fe0001",
    muted="#fe0002",
    grid="#fe0003",
    surface="#fe0004",
    series=tuple(f"#fe01{index:02x}" for index in range(len(SERIES_NAMES))),
)
"""For the page: colours that no plot uses, each standing for a CSS variable."""


def to_css_variables(svg: str) -> str:
    """Replaces the placeholder colours of an SVG by ``var(--plot-...)``."""
    names = {
        PLACEHOLDERS.ink: "ink",
        PLACEHOLDERS.muted: "muted",
        PLACEHOLDERS.grid: "grid",
        PLACEHOLDERS.surface: "surface",
        **dict(zip(PLACEHOLDERS.series, SERIES_NAMES, strict=True)),
    }
    for colour, name in names.items():
        svg = svg.replace(colour, f"var(--plot-{name})")
    return svg
