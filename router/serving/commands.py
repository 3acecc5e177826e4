"""What the commands of all three programs share: the question before what cannot be undone, and the event loop."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import NoReturn, TypeVar

import click

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
