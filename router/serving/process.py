"""What a process asks of its terminal, of Python and of the kernel.

The question before what cannot be undone, the event loop, few collections of garbage, an end with the parent.
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

    A collection of all that a gateway imports and builds takes 70 ms, in which no stream goes on and calls with a
    short timeout, such as the shared cache's, fail.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def end_with_parent() -> None:
    """Run in a child before exec: request SIGTERM when the parent dies, even from kill -9 (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


T = TypeVar("T")


def refuse(program: str, message: str) -> NoReturn:
    """Print an error of the caller's as one line on stderr and exit with status 2."""
    click.echo(f"{program}: {message}", err=True)
    sys.exit(2)


def ask(program: str, question: str, *, yes: bool) -> None:
    """Ask before what cannot be undone; return if the answer is yes, or was given before (`--yes`).

    Exits with status 1 if the answer is no, and with 2 if there is no terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        message = f"{question} Nothing was changed: there is no terminal to ask at; --yes answers the question"
        refuse(program, message)
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        agreed = False
    if not agreed:
        click.echo(f"{program}: nothing was changed", err=True)
        sys.exit(1)


def run_fast(main: Coroutine[None, None, T]) -> T:
    """Run as asyncio.run does, on uvloop where that is installed: a streamed token costs a tenth less."""
    try:
        import uvloop
    except ImportError:
        import asyncio  # commands that do not serve begin without it

        return asyncio.run(main)
    return uvloop.run(main)
