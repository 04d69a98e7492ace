"""Numbers and text for people, shared by the console and the report. Pure functions."""

import math
import re

HUGE = 1e9
"""Numbers from here on are written with an exponent."""


def format_number(value: float | None, digits: int = 3) -> str:
    """A number in ``digits`` digits: ``0.512``, ``1.23e-05``, ``12,345``; ``-`` for ``None``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -3 or abs(value) >= HUGE:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def format_fixed(value: float | None, decimals: int) -> str:
    """A number with fixed decimals, which keeps a column aligned; ``-`` for ``None``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{decimals}f}" if abs(value) < HUGE else f"{value:.2e}"


def format_percent(share: float | None, decimals: int = 1) -> str:
    """A share of 1 as a percentage: ``51.2%``; ``-`` for ``None``."""
    if share is None:
        return "-"
    return f"{format_fixed(100 * share, decimals)}%" if math.isfinite(share) else str(share)


def format_change(change: float | None, *, points: bool) -> str:
    """A difference with its sign: in percentage points (``+35.5 points``) or as a number."""
    if change is None:
        return "-"
    return f"{100 * change:+.1f} points" if points else f"{change:+.3f}"


def format_count(value: float | None) -> str:
    """A count in at most five characters: ``873``, ``12.3k``, ``4.5M``; ``-`` for ``None``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    for limit, divisor, suffix in ((999.5, 1.0, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M")):
        if abs(value) < limit:
            scaled = value / divisor
            return f"{scaled:.{1 if suffix and abs(scaled) < 99.95 else 0}f}{suffix}"
    return f"{value / 1e9:.1f}G"


def format_duration(seconds: float | None) -> str:
    """A duration in two units: ``8.2s``, ``4m05s``, ``3h12m``, ``2d04h``; ``-`` for ``None``."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def visible(text: str) -> str:
    """Text with unprintable characters spelled out: a model's output must not steer a terminal."""
    return "".join(
        char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in text
    )


def last_line(text: str) -> str:
    """The last line that holds something: of a prompt with solved examples, the question.

    A bare label (``A:``, ``Answer:``) is joined to the line before it.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and re.fullmatch(r"\w+ ?:", lines[-1]):
        return f"{lines[-2]} {lines[-1]}"
    return lines[-1] if lines else ""


def shorten(text: str, limit: int) -> str:
    """Text cut in the middle to at most ``limit`` characters, with ``...`` where it was cut."""
    if len(text) <= limit:
        return text
    head = (limit - 3 + 1) // 2
    tail = limit - 3 - head
    return f"{text[:head]}...{text[len(text) - tail :]}"


def encodable(text: str, encoding: str) -> str:
    """Text that ``encoding`` can hold: other characters become backslash escapes."""
    return text.encode(encoding, "backslashreplace").decode(encoding)
