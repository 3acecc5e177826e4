"""What every command needs to run and to fail: signals, log levels and error exits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Literal, NoReturn, ParamSpec, TypeVar

from router.errors import CausewayError
from router.serving import commands
from router.serving.logs import log_loop_errors

from ..core.principal import DEFAULT_TENANT

PROGRAM = "causeway-cloud"
LogLevel = Literal["debug", "info", "warning", "error"]
P = ParamSpec("P")
T = TypeVar("T")
OTHER_NAMES = (
    f"Devices of a token file are of the tenant `{DEFAULT_TENANT}`; "
    "the audit file names each request's tenant and device."
)
"""Said where nothing is found of a tenant: its name may be another one."""


def refuse(message: str) -> NoReturn:
    """Print an error of the operator's as one line on stderr and exit with status 2."""
    commands.refuse(PROGRAM, message)


def report_errors(*errors: type[Exception]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that turns CausewayError and `errors` of a command into `refuse`."""

    expected: tuple[type[Exception], ...] = (CausewayError, *errors)

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                command(*args, **kwargs)
            except expected as error:
                refuse(str(error))

        return run

    return decorate


def keep_files_private() -> None:
    """Have what this process writes (audit records, uploaded files, copies of revocations) be for its account alone."""
    os.umask(0o077)


def poll_grpc_in_one_thread() -> None:
    """Have gRPC read its sockets in the thread that wakes the event loop; call this before gRPC is imported.

    Its event engine reads them in a thread of its own, which costs 20 µs more per streamed token. A gRPC without this
    experiment (github.com/grpc/grpc, src/core/lib/experiments) ignores it.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")


def until_stopped(
    work: Callable[[asyncio.Event], Awaitable[T]], run: Callable[[Coroutine[None, None, T]], T] = asyncio.run
) -> T:
    """Run until SIGTERM or Ctrl-C sets the event that `work` gets. A further Ctrl-C cancels `work` (exit status 1).

    A further SIGTERM is ignored: the kernel sends one for each thread of a parent that dies (prctl(2)).
    """

    async def supervised() -> T:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        log_loop_errors(loop)
        task = asyncio.ensure_future(work(stop))

        def interrupt() -> None:
            if stop.is_set():
                task.cancel()
            stop.set()

        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, interrupt)
        return await task

    try:
        return run(supervised())
    except asyncio.CancelledError:
        sys.exit(1)
