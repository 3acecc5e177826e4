"""Shared parts of the commands: the configuration, signals, log levels and error exits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import click

from causeway_server.router.errors import CausewayError, ConfigError
from causeway_server.router.serving import process
from causeway_server.router.serving.logs import log_crashes, log_loop_errors, start_log
from causeway_server.router.serving.process import option

from ..config import Config, Flags, load_config
from ..core.principal import DEFAULT_TENANT

PROGRAM = "causeway-cloud"
PATH = click.Path(path_type=Path)
T = TypeVar("T")
OTHER_NAMES = (
    f"Devices of a token file belong to the tenant `{DEFAULT_TENANT}`. The audit file names each "
    "request's tenant and device."
)
"""A hint for a tenant without data, which may have another name."""


def refuse(message: str) -> NoReturn:
    """Print an operator's error as one line on stderr and exit with status 2."""
    process.refuse(PROGRAM, message)


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn CausewayError and OSError of a command into a call of `refuse`. click handles a broken output pipe."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (CausewayError, OSError) as error:
            refuse(str(error))

    return run


class ConfigSource(NamedTuple):
    """The options that name the gateways' Redis, read at first use: some commands need none of them."""

    path: Path | None
    redis: str | None

    @property
    def is_given(self) -> bool:
        return self.path is not None or self.redis is not None

    def load(self) -> Config:
        """Load the configuration. Raises ConfigError."""
        return load_config(self.path, Flags(redis=self.redis))


def redis_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name the gateways' Redis, as `source`; `refuse` prints its errors."""

    @report_errors
    @wraps(command)
    def run(*args: Any, path: Path | None, redis: str | None, **options: Any) -> None:
        command(*args, source=ConfigSource(path, redis), **options)

    redis = option("--redis", "URL of the Redis that gateways and workers share.", envvar="CAUSEWAY_REDIS")
    return option("--config", "Configuration file of the gateways (YAML).", PATH, to="path")(redis(run))


def poll_grpc_in_one_thread() -> None:
    """Make gRPC read its sockets in the thread that wakes the event loop. Call it before gRPC is imported.

    gRPC's event engine otherwise uses a thread of its own: 20 µs more per streamed token. A gRPC version without this
    experiment (github.com/grpc/grpc, src/core/lib/experiments) ignores it.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")


class ConfiguredProcess(NamedTuple):
    """The start arguments of `serve`, `worker` and `stream`. `reread`: reads the configuration again."""

    config: Config
    reread: Callable[[], Config]
    flags: Flags


_OPTIONS = (
    option(
        "--config", "Configuration file of the gateways (YAML). The flags of this command override it.", PATH, to="path"
    ),
    option("--redis", "URL of the Redis that gateways and workers share.", envvar="CAUSEWAY_REDIS"),
    option("--triton", "Address (host:port) of Triton's gRPC port, for tiers that set no address themselves."),
    option(
        "--tier",
        "Name of a tier. The tier's artifact and model have the same name. May be repeated.",
        to="tiers",
        multiple=True,
    ),
    option(
        "--model-dir",
        "Folder in which artifacts are looked for first; may be repeated.",
        PATH,
        to="model_dirs",
        multiple=True,
    ),
    option("--log", "Log level.", click.Choice(["debug", "info", "warning", "error"])),
)


def configured_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, whose first argument becomes a ConfiguredProcess. A ConfigError ends it.

    Options that are configuration flags go into the configuration; the command gets the others.
    """

    @wraps(command)
    def start(*, path: Path | None, **options: Any) -> None:
        flag_values = {name: _as_flag(options.pop(name)) for name in Flags.__struct_fields__ if name in options}
        flags = Flags(**flag_values)
        # Audit records, uploaded files, copies of revocations: what this process writes is for its account alone.
        os.umask(0o077)
        poll_grpc_in_one_thread()
        try:
            config = load_config(path, flags)
            start_log(config.log, config.log_format)
            log_crashes()
            command(ConfiguredProcess(config, lambda: load_config(path, flags), flags), **options)
        except ConfigError as error:
            refuse(error.message)

    for add in reversed(_OPTIONS):
        start = add(start)
    return start


def _as_flag(value: Any) -> Any:
    """Return an option's value for the configuration, with absolute paths."""
    if isinstance(value, tuple):
        return tuple(map(_as_flag, value))
    return str(value.absolute()) if isinstance(value, Path) else value


def until_stopped(
    work: Callable[[asyncio.Event], Awaitable[T]], run: Callable[[Coroutine[None, None, T]], T] = asyncio.run
) -> T:
    """Run until SIGTERM or Ctrl-C sets the event that `work` gets. A second Ctrl-C cancels `work` (exit status 1).

    Further SIGTERMs are ignored: the kernel sends one for each thread of a parent that dies (prctl(2)).
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
