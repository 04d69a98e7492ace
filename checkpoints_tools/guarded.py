"""What a damaged or forged pickle does, as one sentence."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Refused(pickle.UnpicklingError):
    """The pickle names something that is not in the reader's table."""


def guarded(file: Path, load: Callable[[], Any]) -> Any:
    """Runs an unpickling function and turns what can go wrong into one sentence.

    Raises:
        ValueError: The file is damaged, or names what it may not.
    """
    try:
        return load()
    # A damaged pickle or archive fails in any of these ways; torch reports with several lines.
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, Refused) or named:
            raise ValueError(
                f"{file} was refused: it names {named[1] if named else error}, which a checkpoint "
                "has no use for and which could run code; get it from a source that you trust."
            ) from error
        what = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{file} is damaged or was not written to its end ({type(error).__name__}: {what}); "
            "copy the checkpoint again."
        ) from error
