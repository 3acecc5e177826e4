"""What a process asks of its terminal, of Python, of the kernel and of the disk.

The question before what cannot be undone, the event loop, few collections of garbage, an end with the parent; rights of
folders that keep other accounts out, and names that survive a power cut.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import stat
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
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


def is_shared(folder: Path, own: re.Pattern[str]) -> bool:
    """Whether every account writes its own files there, as in /tmp. A new volume has such rights, too, and is empty.

    Args:
        own: names of our files.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names alone
        return bool(folder.stat().st_mode & stat.S_ISVTX) and not all(map(own.fullmatch, names))
    except OSError:
        return False


def close_to_others(folder: Path, own: re.Pattern[str]) -> Iterator[OSError]:
    """Take the rights of other accounts from a folder, the files in it that are ours, and what is below them.

    Earlier versions left some files readable. What another account owns stays as it is; links are not followed.

    Args:
        own: names of our files. Others keep their rights: the folder may be a home folder.

    Yields:
        An error for each file whose rights cannot be changed.
    """
    for path, folders, files, at in os.fwalk(folder, follow_symlinks=False):
        if Path(path) == folder:
            folders[:] = filter(own.fullmatch, folders)
            files[:] = filter(own.fullmatch, files)
        for name in (".", *folders, *files):
            try:
                _close_file(name, at)
            except OSError as error:
                yield OSError(error.errno, error.strerror, str(Path(path) / name))


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _close_file(name: str, folder: int) -> None:
    """Raises OSError."""
    found = os.lstat(name, dir_fd=folder)
    is_content = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)  # A link is not what it names.
    if not is_content or not found.st_mode & 0o077 or found.st_uid != os.geteuid():
        return
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) & 0o700)
    finally:
        os.close(file)
