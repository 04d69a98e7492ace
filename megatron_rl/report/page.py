"""Writes the report of a run, and the comparison of several, as self-contained HTML pages.

A page needs no network and runs no script: styles and plots are inline, and a content-security
policy forbids anything else, since prompts and answers come from data sets and models. All text is
escaped by the template engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl import __version__
from megatron_rl.metrics.files import atomic_write
from megatron_rl.metrics.text import last_line
from megatron_rl.report import view
from megatron_rl.report.load import RunData, load_run
from megatron_rl.report.palette import (
    CURVE_POINTS_FOR_AVERAGE,
    PAPER,
    PLACEHOLDERS,
    SERIES_NAMES,
)

SHOWN_ANSWERS = 8
REPORT_FILE = "report.html"
PLOTS_FOLDER = "plots"


def build_report(run_dir: Path) -> Path:
    """Writes ``report.html`` and ``plots/*.png`` into a run directory.

    Works on a run that is still going, was stopped or crashed; the page then says so.

    Args:
        run_dir: The run directory.

    Returns:
        The path of the page.

    Raises:
        ValueError: ``run_dir`` is no run directory.
        RunWriteError: The page or a plot cannot be written.
    """
    from megatron_rl.report.charts import CHARTS, figure_of
    from megatron_rl.report.drawing import draw_nothing, new_figure, to_inline_svg, write_png

    run = load_run(run_dir)
    plots = []
    for chart in CHARTS:
        figure = figure_of(chart, run, PAPER)
        if figure is None:
            figure = new_figure()
            draw_nothing(figure, PAPER, "No data recorded")
        write_png(figure, run_dir / PLOTS_FOLDER / f"{chart.name}.png", PAPER, chart.title)
        figure = figure_of(chart, run, PLACEHOLDERS)
        svg = figure and to_inline_svg(figure, name=chart.name, description=chart.caption)
        plots.append({"title": chart.title, "caption": chart.caption, "svg": svg})
    page = run_dir / REPORT_FILE
    atomic_write(page, _render("report.html.j2", _report_context(run, plots)))
    return page


def _report_context(run: RunData, plots: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    hero, cards = view.headline_cards(run)
    pairs = view.answer_pairs(run)
    heads, rows, num_steps = view.step_table(run)
    kind, sentence = view.status_of(run)
    return {
        "title": run.name,
        "run": run,
        "status_kind": kind,
        "status": sentence,
        "facts": view.facts_of(run),
        "warnings": view.warnings_of(run),
        "gate": run.gate,
        "problems": [*run.problems, *_missing(run, has_pairs=bool(pairs))],
        "hero": hero,
        "cards": cards,
        "changes": run.changes,
        "plots": plots,
        "has_long_curves": run.last_step > CURVE_POINTS_FOR_AVERAGE,
        "pairs": view.chosen_answers(pairs),
        "num_pairs": len(pairs),
        "num_shown": SHOWN_ANSWERS,
        "transitions": view.transitions(pairs),
        "sample_steps": view.sample_steps(run),
        "mismatch": {
            "mean": run.mean("rollout_corr/logp_diff_abs_mean"),
            "max": run.highest("rollout_corr/logp_diff_abs_max"),
            "exact": run.mean("rollout_corr/exact_share"),
        },
        "heads": heads,
        "rows": rows,
        "num_steps": num_steps,
        "environment": view.environment_rows(run.environment),
    }


def _missing(run: RunData, *, has_pairs: bool) -> list[str]:
    """Sentences on what an unfinished run does not have yet."""
    missing = []
    if run.last_step == 0:
        missing.append("No training step was recorded: there are no curves yet.")
    elif not run.is_complete and run.total_steps:
        missing.append(
            f"The run stopped or is still going: {run.last_step} of {run.total_steps} steps."
        )
    if not run.changes:
        missing.append("No held-out evaluation was recorded: there is no before and after.")
    elif not has_pairs:
        missing.append("Held-out answers were not recorded both before and after training.")
    return missing


def build_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes a page that compares runs: one table, and plots with one curve a run.

    The plots are also written as PNG files, into a folder beside the page (``comparison.plots``
    for ``comparison.html``).

    Args:
        run_dirs: Directories of two or more runs (at most eight, which colours tell apart).
        out: The HTML file to write.

    Returns:
        ``out``.

    Raises:
        ValueError: There are fewer than two or more than eight runs, or one is no run directory.
        RunWriteError: The page or a plot cannot be written.
    """
    from megatron_rl.report.comparison import COMPARISON_CHARTS, comparison_figure, row_of
    from megatron_rl.report.drawing import to_inline_svg, write_png

    if not 2 <= len(run_dirs) <= len(SERIES_NAMES):
        raise ValueError(
            f"a comparison needs 2 to {len(SERIES_NAMES)} run directories, not {len(run_dirs)}"
        )
    runs = [load_run(run_dir) for run_dir in run_dirs]
    names = unique_names(runs)
    plots = []
    by_name = dict(zip(names, runs, strict=True))
    for chart in COMPARISON_CHARTS:
        figure = comparison_figure(chart, by_name, PAPER)
        if figure is not None:
            png = out.with_suffix(".plots") / f"{chart.name}.png"
            write_png(figure, png, PAPER, chart.title)
        figure = comparison_figure(chart, by_name, PLACEHOLDERS)
        svg = figure and to_inline_svg(figure, name=chart.name, description=chart.caption)
        plots.append({"title": chart.title, "caption": chart.caption, "svg": svg})
    context = {
        "title": "Comparison of runs",
        "rows": [
            (colour, name, row_of(run))
            for colour, name, run in zip(SERIES_NAMES, names, runs, strict=False)
        ],
        "plots": plots,
        "has_long_curves": max(run.last_step for run in runs) > CURVE_POINTS_FOR_AVERAGE,
    }
    atomic_write(out, _render("comparison.html.j2", context))
    return out


def unique_names(runs: Sequence[RunData]) -> list[str]:
    """Names of runs, with the path where two share a name."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.path})"
        for name, run in zip(names, runs, strict=True)
    ]


def _render(template: str, context: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": view.format_number,
        "fixed": view.format_fixed,
        "percent": view.format_percent,
        "share": view.format_share,
        "change": view.format_change,
        "last_line": last_line,
    }
    return environment.get_template(template).render(version=__version__, **context)
