"""What of a response a verifier looks at."""

import re
from collections.abc import Callable

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def extract_answer(response: str, rule: str) -> str:
    """Applies an extraction rule; the empty string when it finds nothing.

    Args:
        response: The response's text.
        rule: One of the values of ``reward.extract``.
    """
    return _RULES[rule](response)


def _first_line(response: str) -> str:
    lines = response.strip("\n").splitlines()
    return lines[0].strip() if lines else ""


def _number(index: int) -> Callable[[str], str]:
    def rule(response: str) -> str:
        found = NUMBER.findall(response)
        return found[index].replace(",", "") if found else ""

    return rule


def _answer_tag(response: str) -> str:
    found = ANSWER_TAG.findall(response)
    return found[-1].strip() if found else ""


def _boxed(response: str) -> str:
    r"""Content of the last ``\boxed{...}``, braces balanced."""
    start = response.rfind("\\boxed{")
    if start < 0:
        return ""
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[position], 0)
        if depth == 0:
            return response[begin:position].strip()
    return ""


_RULES: dict[str, Callable[[str], str]] = {
    "none": str.strip,
    "first_line": _first_line,
    "first_number": _number(0),
    "last_number": _number(-1),
    "boxed": _boxed,
    "answer_tag": _answer_tag,
}
