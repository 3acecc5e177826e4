"""Process utilities: confirmation at the terminal, the event loop, garbage collection, and ending with the parent
process.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from collections.abc import Coroutine
from typing import NoReturn, TypeVar

import click

_GC_THRESHOLD = 10_000  # allocations between collections of the youngest generation: about fifty requests
_PR_SET_PDEATHSIG = 1


def tune_garbage_collector() -> None:
    """Exclude the objects that exist after the start from collections, and collect young objects less often.

    Collecting everything that a gateway imports and builds takes 70 ms, in which all streams pause and calls with a
    short timeout, such as the shared cache's, fail.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def end_with_parent() -> None:
    """Request SIGTERM when the parent dies, even from kill -9 (Linux, prctl(2)). Call it in a child before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


T = TypeVar("T")


def refuse(program: str, message: str) -> NoReturn:
    """Print a usage error as one line on stderr and exit with status 2."""
    click.echo(f"{program}: {message}", err=True)
    sys.exit(2)


def ask(program: str, question: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `--yes` was given, before an action that cannot be undone.

    Exits with status 1 if the answer is no, and with 2 if there is no terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        message = f"{question} Nothing was changed: there is no terminal to ask at; --yes answers the question."
        refuse(program, message)
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        agreed = False
    if not agreed:
        click.echo(f"{program}: Nothing was changed.", err=True)
        sys.exit(1)


def run_fast(main: Coroutine[None, None, T]) -> T:
    """Run a coroutine like asyncio.run, on uvloop if that is installed, which makes a streamed token a tenth
    cheaper.
    """
    try:
        import uvloop
    except ImportError:
        import asyncio  # imported late, so that commands without a server start faster

        return asyncio.run(main)
    return uvloop.run(main)
