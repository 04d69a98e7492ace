"""A process that scores responses: ``python -m megatron_rl.rewards.worker FUNCTION LIMIT_S``.

Reads one JSON request a line on standard input and answers one JSON line. It exists so that a
function which hangs, crashes or leaks can be killed without the trainer, and it imports no torch,
so that it starts at once. What the function prints goes to standard error. The trainer keeps the
time; ``LIMIT_S`` only ends a hanging worker whose trainer is gone.
"""

import faulthandler
import importlib.util
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.rewards.interface import RewardRequest, ScoreFunction, call
from megatron_rl.rewards.verifiers import BUILT_IN, built_in, prepare


def load_function(name: str) -> ScoreFunction:
    """A built-in verifier, or ``path/to/file.py:function``.

    Raises:
        ValueError: There is no such verifier, file or function, or the file does not import.
    """
    if name in BUILT_IN:
        prepare(name)
        return built_in(name)
    path, separator, attribute = name.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise ValueError(
            f"reward.function={name!r} is neither a built-in ({', '.join(BUILT_IN)}) nor of the "
            "form path/to/file.py:compute_score"
        )
    if not Path(path).is_file():
        raise ValueError(f"reward.function={name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("user_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file look their module up by name; helpers may lie beside it.
    sys.modules[spec.name] = module
    sys.path.append(str(Path(path).resolve().parent))
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


def main() -> None:
    """Answers requests until standard input closes."""
    name, limit_s = sys.argv[1], float(sys.argv[2])
    # Signals are the trainer's to handle: a batch that is being scored ends in order.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The function gets neither end of the conversation.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        function = load_function(name)
    except ValueError as error:
        replies.write(json.dumps({"error": str(error)}) + "\n")
        return
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in requests:
        request = RewardRequest(**json.loads(line))
        faulthandler.dump_traceback_later(limit_s, exit=True)
        result = call(function, request, failure_score=0.0)
        faulthandler.cancel_dump_traceback_later()
        replies.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
