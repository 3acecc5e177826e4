"""The program `python3 -m tests.prepare GOAL`, which sets up everything that GOAL needs, and is quick if that exists
already.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .environments import write_locks
from .places import Places, choose_python, find_places
from .plan import plan
from .progress import Progress, StepFailed, carry_out

GOALS = ("run", "fleet", "test", "quick", "check", "bench", "dist", "vllm", "train", "lock")


def main() -> int:
    """Set up the goal and return the exit status: 0 ready, 1 a step failed, 130 interrupted, 143 terminated."""
    parser = argparse.ArgumentParser(prog="prepare", description="Sets this checkout up.")
    parser.add_argument("goal", choices=GOALS)
    goal = parser.parse_args().goal
    signal.signal(signal.SIGTERM, _terminated)
    progress = Progress(sys.stdout)
    try:
        places = find_places(os.environ)
        choose_python(places.venv, os.environ)
        with _alone(places, progress):
            _prepare(goal, places, progress)
    except StepFailed as fault:
        return _explain(fault)
    except OSError as fault:
        return _explain(StepFailed(str(fault), "The checkout and the cache must be writable, with space left."))
    except KeyboardInterrupt:
        print("\nInterrupted. Finished steps are kept: the same command continues from here.", file=sys.stderr)
        return 130
    return 0


def _prepare(goal: str, places: Places, progress: Progress) -> None:
    began = time.monotonic()
    if goal == "lock":
        progress.begin("[lock]", "resolving")
        progress.end(write_locks(places, progress))
        return
    done = carry_out(plan(goal, places, os.environ), progress)
    words = f"set-up done, {done} step{'s' * (done > 1)}" if done else "set-up is current"
    print(f"{words} ({time.monotonic() - began:.1f} s)", flush=True)


@contextmanager
def _alone(places: Places, progress: Progress) -> Iterator[None]:
    """Hold the lock of set-ups: a second one waits, then finds the work done. The lock ends with the process."""
    places.cache.mkdir(parents=True, exist_ok=True)
    with (places.cache / "prepare.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.begin("[wait]", "waiting for another set-up")
            fcntl.flock(handle, fcntl.LOCK_EX)
            progress.end("the other set-up has finished")
        yield


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)  # an exception, so that the programs we started are ended on the way out


def _explain(fault: StepFailed) -> int:
    print(f"\n\nSet-up failed: {fault.fault}", file=sys.stderr)
    if fault.tail:
        print("\n".join(f"    {line}" for line in fault.tail.splitlines()), file=sys.stderr)
    if fault.log is not None:
        print(f"Full log: {fault.log}", file=sys.stderr)
    if fault.advice:
        print(f"What to do: {fault.advice}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
