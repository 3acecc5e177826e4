"""The beds and benchmarks as programs: what they start ends with them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import psutil

GRACE_S = 10.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h


def run_tool(main: Callable[[], object], grace_s: float = GRACE_S) -> int:
    """Run a tool and return its exit status; then end every process that it, or a program of its, left behind.

    SIGTERM does what Ctrl-C does: `main` is interrupted, so that its own clean-up runs, and the status is 128 and the
    signal's number.

    Args:
        main: The tool; returns its exit status, or anything else for 0.
        grace_s: How long the processes have after SIGTERM, until SIGKILL.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) != 0:  # orphans become children of this process
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    caught: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        caught.append(number)
        signal.raise_signal(signal.SIGINT)  # as Ctrl-C, which asyncio turns into a cancellation

    asyncio.set_event_loop_policy(_WokenBySignals())
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
    status: object = None
    try:
        status = main()
    except KeyboardInterrupt:
        caught.append(signal.SIGINT)
    except (Exception, SystemExit):  # that what it started has ended, too, is for many tools a fault
        if not caught:
            raise
        traceback.print_exc()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _end(psutil.Process().children(recursive=True), grace_s)
    if caught:
        print(f"ended by {signal.Signals(caught[0]).name}", file=sys.stderr, flush=True)
        return 128 + caught[0]
    return status if isinstance(status, int) else 0


class _WokenBySignals(asyncio.DefaultEventLoopPolicy):
    """Event loops that every signal wakes up, also one that comes just before the loop begins to wait.

    asyncio writes signals to its own pipe only once it has a signal handler of its own.
    """

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGURG, lambda: None)
        return loop


def _end(processes: Sequence[psutil.Process], grace_s: float) -> None:
    for process in processes:
        _send(process, signal.SIGTERM)
        _send(process, signal.SIGCONT)  # one that a fault has stopped
    psutil.wait_procs(processes, grace_s)
    # What a supervisor started meanwhile is ended, too.
    left = psutil.Process().children(recursive=True)
    for process in left:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(left, grace_s)


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
