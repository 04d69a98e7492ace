"""A process that scores responses: ``python -m megatron_rl.rewards.worker FUNCTION``.

Reads one JSON request a line on standard input and answers one JSON line. It exists so that a
function which hangs, crashes or leaks can be killed without the trainer, and it imports no torch,
so that it starts at once. What the function prints goes to standard error.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_rl.rewards.interface import ScoreFunction, parse_score
from megatron_rl.rewards.verifiers import BUILT_IN, built_in


def load_function(name: str) -> ScoreFunction:
    """A built-in verifier, or ``path/to/file.py:function``.

    Raises:
        ValueError: There is no such verifier, file or function, or the file does not import.
    """
    if name in BUILT_IN:
        return built_in(name)  # type: ignore[no-any-return]
    path, separator, attribute = name.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise ValueError(
            f"reward.function={name!r} is neither a built-in ({', '.join(BUILT_IN)}, auto) nor of "
            "the "
            "form path/to/file.py:compute_score"
        )
    if not Path(path).is_file():
        raise ValueError(f"reward.function={name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("user_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"reward.function={name!r}: importing {path} failed with {type(error).__name__}: "
            f"{error}"
        ) from error
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward.function={name!r}: {path} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def answer(function: ScoreFunction, request: dict[str, Any]) -> dict[str, Any]:
    """Scores one request; an exception becomes a failure with its type and message."""
    try:
        result = parse_score(
            function(
                request["data_source"],
                request["response"],
                request["ground_truth"],
                request["extra_info"],
            )
        )
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    extra = {k: v for k, v in result.extra.items() if isinstance(v, str | int | float | bool)}
    return {"score": result.score, "accuracy": result.accuracy, "extra": extra}


def main() -> None:
    """Answers requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        function = load_function(sys.argv[1])
    except ValueError as error:
        replies.write(json.dumps({"error": str(error)}) + "\n")
        return
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(answer(function, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
