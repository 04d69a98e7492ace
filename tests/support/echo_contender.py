"""A contender that answers with what it was sent, counts while it waits, and ends when told to."""

import threading
import time

from benchmarks._common import Turns


def main() -> None:
    turns = Turns()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while True:
            time.sleep(0.001)
            ticks += 1

    threading.Thread(target=tick, daemon=True).start()
    while True:
        message = turns.wait()
        if message.get("end"):
            raise SystemExit("told to end")
        print("not an answer")
        turns.answer(message | {"ticks": ticks})


if __name__ == "__main__":
    main()
