"""A run, or several, as one HTML page with plots, built from run directories alone.

Importing this package imports neither matplotlib nor jinja2; building a page does.
"""

from megatron_rl.report.page import build_comparison, build_report

__all__ = ["build_comparison", "build_report"]
