"""Values of any origin as what JSON holds, so that a row can go to a file or to another process."""

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """``value`` as text, numbers, booleans, None, lists and mappings with text keys.

    Arrays and their scalars become lists and numbers; what has no such form becomes its text.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
