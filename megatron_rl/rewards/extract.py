"""What of a response a verifier looks at.

Every rule takes time linear in the response: rules run without a time limit, on whatever a policy
writes.
"""

import re
from collections.abc import Callable

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?"  # a sign, unless it is an operator: 10-4 is 10 and 4
    r"(?:"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.5 is one, 1,2 are two
    r"|(?<![0-9])\.[0-9]+"
    r")(?:[eE][-+]?[0-9]+)?",
    re.ASCII,
)
ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def extract_answer(response: str, rule: str) -> str:
    """Applies an extraction rule; the empty string when it finds nothing.

    Args:
        response: The response's text.
        rule: One of the values of ``reward.extract``.
    """
    return _RULES[rule](response)


def _first_line(response: str) -> str:
    """The first line that is not blank."""
    lines = response.strip().splitlines()
    return lines[0].strip() if lines else ""


def _number(index: int) -> Callable[[str], str]:
    def rule(response: str) -> str:
        found = NUMBER.findall(response)
        return found[index].replace(",", "") if found else ""

    return rule


def _answer_tag(response: str) -> str:
    """Content of the last closed pair of tags."""
    answer, begin = "", None
    for tag in ANSWER_TAG.finditer(response):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            answer, begin = response[begin : tag.start()].strip(), None
    return answer


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
