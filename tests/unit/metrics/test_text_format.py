import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.metrics.text import (
    encodable,
    format_change,
    format_count,
    format_duration,
    format_number,
    format_percent,
    last_line,
    shorten,
    visible,
)


@given(st.floats(min_value=-1e12, max_value=1e12).filter(lambda value: abs(value) > 1e-12))
def test_numbers_keep_their_significant_digits(value):
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize("show", [format_number, format_count, format_percent])
def test_what_is_no_number_shows_as_such(show):
    assert show(None) == "-"
    assert show(math.nan) == "nan"
    assert show(-math.inf) == "-inf"


@given(st.floats(0, 9e11))
def test_counts_are_short_and_right(value):
    shown = format_count(value)
    assert len(shown) <= 6
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(shown[-1], 1.0)
    assert float(shown.rstrip("kMG")) * factor == pytest.approx(value, rel=0.051, abs=0.51)


@given(st.floats(0, 1e8))
def test_durations_are_right_to_their_last_unit(seconds):
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    shown, total, number = format_duration(seconds), 0.0, ""
    for char in shown:
        if char in units:
            total += float(number) * units[char]
            last, number = units[char], ""
        else:
            number += char
    assert total == pytest.approx(seconds, abs=0.51 * last)


def test_durations_never_show_60_of_a_unit():
    shown = {format_duration(tenths / 10) for tenths in range(0, 80_000)}
    shown |= {format_duration(float(seconds)) for seconds in range(80_000, 200_000, 7)}
    assert not any("60" in part for text in shown for part in text.replace("h", "m").split("m"))


@pytest.mark.parametrize(
    ("change", "points", "expected"),
    [(0.355, True, "+35.5 points"), (-0.02, True, "-2.0 points"), (0.25, False, "+0.250")],
)
def test_changes_carry_their_sign(change, points, expected):
    assert format_change(change, points=points) == expected


@given(st.text())
def test_visible_text_has_no_control_character_but_newlines(text):
    shown = visible(text)
    assert all(char == "\n" or char.isprintable() or char.isspace() for char in shown)
    assert not set(shown) & {"\x1b", "\r", "\x07", "\u202e", "\u200b"}
    assert shown.count("\n") == text.count("\n")


@given(st.text(), st.sampled_from(["ascii", "latin-1", "utf-8"]))
def test_encodable_text_encodes(text, encoding):
    shown = encodable(text, encoding)
    shown.encode(encoding)
    assert shown == text or not text.isascii()


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("Q: 1 =\nA: 1\n\nQ: 2 + 3 =", "Q: 2 + 3 ="),
        ("Q: 2 + 3 =\nA:", "Q: 2 + 3 = A:"),
        ("Answer:", "Answer:"),
        ("  \n ", ""),
    ],
)
def test_last_line_is_the_question(prompt, question):
    assert last_line(prompt) == question


@given(st.text(), st.integers(4, 40))
def test_shortened_text_keeps_both_ends(text, limit):
    shown = shorten(text, limit)
    if len(text) <= limit:
        assert shown == text
        return
    assert len(shown) == limit
    cuts = [at for at in range(limit - 2) if shown[at : at + 3] == "..."]
    ends = [(shown[:at], shown[at + 3 :]) for at in cuts]
    assert any(
        text.startswith(head) and text.endswith(tail) and abs(len(head) - len(tail)) <= 1
        for head, tail in ends
    )
