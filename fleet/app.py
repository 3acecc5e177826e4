"""`causeway-fleet serve`: start a control plane from a fleet's folder, listen, and drain on stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import anyio
import msgspec
from aiohttp import web

from router.errors import CausewayError, ConfigError

from .controller.loop import SURVEY_S
from .operators.assembly import build_operators, operator_routes
from .operators.metrics import ControllerCollector
from .repository.fleet_file import FleetDoc
from .repository.folder import check_fleet
from .server.app import all_routes, build_app
from .server.boxes.tokens import load_token_key
from .server.connections import MOST_FILES, Connections, HttpConnection, files_of_connections
from .server.plane import ControlPlane
from .server.polls import IDLE_S
from .server.request import make_request
from .store.database import STATEMENT_S, Store
from .trust.files import close_to_others

_BACKLOG = 4096
# What versions of the control plane have in the data folder.
_OWN_FILES = re.compile(r"fleet\.db.*|token-key\.jwk.*|bootstrap-token.*|.*\.partial")
_DRAIN_S = 5.0
_log = logging.getLogger("causeway.fleet.server")


class ServeSettings(msgspec.Struct, frozen=True):
    """The settings of `causeway-fleet serve`.

    Attributes:
        folder: The fleet's folder, with `fleet.yaml`, `trust.yaml` and `published`.
        keys: The folder with the private keys of the online roles.
        data: The folder with this server's own state: the token key, and SQLite's database.
        database: "": SQLite in `data`.
        issuer: The claim `iss` of the tokens, as the gateways' `identity.issuer`.
        port: 0: any free one.
        most_files: How many files connections may have open; the process's file limit may allow fewer.
        statement_s: As `Store.open`.
        survey_s: As `Controller`.
    """

    folder: Path
    keys: Path
    data: Path
    database: str = ""
    issuer: str = "causeway"
    host: str = "127.0.0.1"
    port: int = 8090
    most_files: int = MOST_FILES
    statement_s: float = STATEMENT_S
    survey_s: float = SURVEY_S


@asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[tuple[ControlPlane, str]]:
    """Run a control plane and yield it with its URL.

    Raises:
        ConfigError: The fleet has errors, a folder cannot be used, or the address is taken.
        StoreUnavailable: The database does not answer.
    """
    fleet = read_fleet_folder(settings.folder)
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = load_token_key(settings.data / "token-key.jwk", settings.issuer)  # refuses one that others could read
    try:
        close_to_others(settings.data, _OWN_FILES)
    except OSError as error:
        raise ConfigError(
            f"{settings.data} cannot be kept from other accounts: {error.strerror}. Name a folder of its own.",
            where="--data",
        ) from error
    if not settings.database:  # SQLite gives the files beside it the same rights.
        os.close(os.open(settings.data / "fleet.db", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    database = settings.database or f"sqlite:///{settings.data.resolve() / 'fleet.db'}"
    store = await Store.open(database, settings.statement_s)
    try:
        connections = Connections(files_of_connections(settings.most_files))
        plane = ControlPlane(settings.folder, fleet, store, key, connections=connections)
        await plane.wakes.refresh()
        operators = build_operators(
            settings.folder,
            settings.keys,
            settings.data,
            fleet,
            store,
            plane.clock,
            plane.wakes.refresh,
            settings.survey_s,
        )
        runner = web.AppRunner(
            build_app(all_routes(plane, operator_routes(operators), (ControllerCollector(operators.controller),))),
            handler_cancellation=True,  # a poll ends when its box leaves
            shutdown_timeout=_DRAIN_S,
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        server.request_factory = make_request
        plane.wakes.polls.new_handler = lambda: HttpConnection(
            server,
            connections,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=IDLE_S,
        )
        try:
            listening, url = await _listen(plane.wakes.polls.new_handler, settings)
            with closing(listening):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(plane.run)
                    tasks.start_soon(operators.controller.run)
                    try:
                        yield plane, url
                        listening.close()
                        plane.wakes.close()
                        await runner.cleanup()
                    finally:
                        tasks.cancel_scope.cancel()
        finally:
            await runner.cleanup()
    finally:
        await store.close()


def read_fleet_folder(folder: Path) -> FleetDoc:
    """Read `fleet.yaml`. Raises ConfigError, which names the first error."""
    checked = check_fleet(folder)
    if checked.fleet is None or checked.failed:
        problem = next(problem for problem in checked.problems if problem.severity == "error")
        raise ConfigError(problem.message, where=str(problem.location))
    return checked.fleet


async def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT; print one line when it is ready.

    Raises:
        CausewayError: As `running`; or a background task failed, which ends the control plane.
    """
    allow_many_files()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with running(settings) as (plane, url):
            _log.info("the fleet %s is served at %s", plane.fleet.name, url)
            print(f"ready url={url}", flush=True)
            await stop.wait()
            _log.info("stopping")
    except BaseExceptionGroup as error:
        _log.critical("A background task failed, and the control plane ends.", exc_info=error)
        raise CausewayError("A background task failed, and the control plane ends.") from error


def allow_many_files() -> None:
    """Raise the process's file limit: each parked poll is a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _listen(
    new_handler: Callable[[], HttpConnection], settings: ServeSettings
) -> tuple[asyncio.AbstractServer, str]:
    """Return the listening server and its URL."""
    try:
        listening = await asyncio.get_running_loop().create_server(
            new_handler, settings.host, settings.port, backlog=_BACKLOG, reuse_address=True
        )
    except OSError as error:
        taken = "another program listens there: stop it, or choose another address"
        reason = taken if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {reason}", where="--listen") from error
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return listening, f"http://{host}:{listening.sockets[0].getsockname()[1]}"
