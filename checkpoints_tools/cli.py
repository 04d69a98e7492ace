"""The command line `checkpoints-tools`.

One sub-command a task, see `checkpoints_tools.commands`. What a user can get wrong is one sentence
on standard error and exit code 2; anything else is a defect and keeps its traceback.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from checkpoints_tools.commands import (
    dequantize,
    export,
    import_gguf,
    import_model,
    inspect_model,
    quantize,
    roundtrip,
    tiny,
    verify,
)

PROGRAM = "checkpoints-tools"
COMMANDS = (
    import_model,
    export,
    quantize,
    dequantize,
    roundtrip,
    inspect_model,
    verify,
    import_gguf,
    tiny,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; those of the process when None.

    Returns:
        Exit code: 0, 2 when the input is wrong (`argparse` itself exits with 2, too), or 1 where a
            command compares and found a difference.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:  # the reader of a table, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Convert and inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
