"""The process of `causeway-fleet serve`: start a control plane from a fleet's folder, listen, and drain on stop."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path

import anyio
import msgspec
from aiohttp import hdrs, web

from causeway_server.router.api.document import OPENAPI_PATH
from causeway_server.router.bundle.protocol import MAX_MESSAGE_BYTES
from causeway_server.router.config import ListenerTls
from causeway_server.router.errors import CausewayError, ConfigError
from causeway_server.router.serving.addresses import bind_tcp, raise_file_limit, url_of
from causeway_server.router.serving.folders import close_to_others, is_shared
from causeway_server.router.serving.tls.contexts import server_tls

from .controller.loop import SURVEY_S, Controller
from .controller.publisher import Publisher
from .openapi import fleet_document
from .operators.oidc import OidcClient
from .operators.operators_file import read_operators
from .operators.routes import OperatorApi, operator_routes
from .operators.sign_in import SignIn, load_bootstrap_token, session_routes
from .repository.fleet_file import FleetDoc
from .repository.folder import check_fleet
from .server.connections import MAX_FILES, Connections, HttpConnection, files_of_connections, make_request
from .server.device_api import device_routes
from .server.files import console_routes, file_routes
from .server.plane import ControlPlane, health_routes
from .server.routes import ApiRoute, errors_as_json, nothing_here
from .server.tokens import load_token_key
from .server.wakes import IDLE_S
from .store.database import STATEMENT_S, Store
from .trust.certificates import Authority
from .trust.keys import TRUST_FILE

BOOTSTRAP_FILE = "bootstrap-token"
# The files of the control plane in the state folder, by any version.
_OWN_FILES = re.compile(r"fleet\.db.*|token-key\.jwk.*|bootstrap-token.*|.*\.partial")
_DRAIN_S = 5.0  # time for handlers to finish when the server stops
log = logging.getLogger(__name__)


class ServeSettings(msgspec.Struct, frozen=True):
    """The settings of `causeway-fleet serve`."""

    folder: Path  # the fleet's folder, with `fleet.yaml`, `trust.yaml` and `published`
    keys: Path  # the folder with the private keys of the online roles
    state_dir: Path  # the folder with this server's own state: the token key, and SQLite's database
    database: str = ""  # the database's URL; "": SQLite in `state_dir`
    issuer: str = "causeway"  # the claim `iss` of the tokens, which must equal the gateways' `identity.issuer`
    host: str = "127.0.0.1"
    port: int = 8090  # the port; 0: any free port
    tls: ListenerTls = ListenerTls()  # the certificates of the address; none by default
    device_ca: Path | None = None  # folder of the devices' CA (`causeway-fleet tls init`); None: no certificates
    max_files: int = MAX_FILES  # maximum number of open files of connections; the process's file limit may allow fewer
    statement_s: float = STATEMENT_S  # time limit of a database statement, see `Store.open`
    survey_s: float = SURVEY_S  # time between surveys of devices, see `Controller`


@asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[tuple[ControlPlane, str]]:
    """Run a control plane and yield it with its URL.

    Raises ConfigError if the fleet has errors, a folder cannot be used or the address is taken, StoreUnavailable.
    """
    fleet = read_fleet_folder(settings.folder)
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    tls = server_tls(settings.tls, "--tls")
    authority = None if settings.device_ca is None else Authority.load(settings.device_ca)
    key = load_token_key(settings.state_dir / "token-key.jwk", settings.issuer)  # refuses a key that others could read
    shared = is_shared(settings.state_dir, _OWN_FILES)
    fault = (
        "a folder that all accounts can write"
        if shared
        else next(map(str, close_to_others(settings.state_dir, _OWN_FILES)), "")
    )
    if fault:
        raise ConfigError(
            f"{settings.state_dir} cannot be protected from other accounts: {fault}. Name a folder that only "
            "this server uses.",
            where="--state-dir",
        )
    if not settings.database:  # SQLite gives the files beside it the same rights.
        os.close(os.open(settings.state_dir / "fleet.db", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    async with AsyncExitStack() as closing_last:
        store = await Store.open(settings.database or sqlite_url(settings.state_dir), settings.statement_s)
        closing_last.push_async_callback(store.close)
        connections = Connections(files_of_connections(settings.max_files))
        plane = ControlPlane(settings.folder, fleet, store, key, connections=connections, authority=authority)
        await plane.wakes.refresh()
        operators = _build_operators(settings, plane)
        # A handler continues after its client has left, so that no transaction is interrupted; parked polls have no
        # handler.
        runner = web.AppRunner(build_app(all_routes(plane, operators)), shutdown_timeout=_DRAIN_S)
        await runner.setup()
        closing_last.push_async_callback(runner.cleanup)
        server = runner.server
        assert server is not None
        server.request_factory = make_request
        loop = asyncio.get_running_loop()
        plane.wakes.polls.new_handler = lambda: HttpConnection(
            server, connections, loop=loop, access_log=None, keepalive_timeout=IDLE_S
        )
        listening = await bind_tcp(plane.wakes.polls.new_handler, settings.host, settings.port, "--listen", tls)
        closing_last.callback(listening.close)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plane.run)
            tasks.start_soon(operators.controller.run)
            try:
                yield plane, url_of(settings.host, listening.sockets[0].getsockname()[1], tls=tls is not None)
                listening.close()
                plane.wakes.close()
                await runner.cleanup()
            finally:
                tasks.cancel_scope.cancel()


def sqlite_url(state_dir: Path) -> str:
    """Return the URL of SQLite's database in a state folder."""
    return f"sqlite:///{state_dir.resolve() / 'fleet.db'}"


def read_fleet_folder(folder: Path) -> FleetDoc:
    """Read `fleet.yaml`. Raises ConfigError, which names the first error."""
    checked = check_fleet(folder)
    if checked.fleet is None or checked.failed:
        problem = next(problem for problem in checked.problems if problem.severity == "error")
        raise ConfigError(problem.message, where=str(problem.location))
    return checked.fleet


async def serve(settings: ServeSettings) -> None:
    """Serve until a signal; print one line when ready. Raises CausewayError, also of a background task."""
    raise_file_limit()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with running(settings) as (plane, url):
            log.info("The control plane serves the fleet %s at %s.", plane.fleet.name, url)
            print(f"ready url={url}", flush=True)
            await stop.wait()
            log.info("Stopping.")
    except BaseExceptionGroup as error:
        log.critical("A background task failed, and the control plane ends.", exc_info=error)
        raise CausewayError("A background task failed, and the control plane ends.") from error


def all_routes(plane: ControlPlane, operators: OperatorApi | None = None) -> list[ApiRoute]:
    """Return every route of the control plane, with `/openapi.json`; `operators` None: devices only."""
    routes = [*device_routes(plane), *file_routes(plane.folder / "published"), *console_routes()]
    routes += health_routes(plane, None if operators is None else operators.controller)
    if operators is not None:
        routes += [*operator_routes(operators), *session_routes(operators.sign_in)]
    return [*routes, _openapi(routes)]


def build_app(routes: Sequence[ApiRoute]) -> web.Application:
    """Return the application with these routes. Bodies have at most MAX_MESSAGE_BYTES, errors are JSON."""
    app = web.Application(client_max_size=MAX_MESSAGE_BYTES)
    for route in routes:
        handler = errors_as_json(route.handler)
        app.router.add_route(route.method, route.path, handler)
        if route.method == hdrs.METH_GET:
            app.router.add_route(hdrs.METH_HEAD, route.path, handler)
    app.router.add_route("*", "/{path:.*}", nothing_here)

    return app


def _openapi(routes: Sequence[ApiRoute]) -> ApiRoute:
    async def send(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=body(), content_type="application/json")

    @cache
    def body() -> bytes:
        return msgspec.json.encode(fleet_document([*routes, route], version("causeway-router")))

    route = ApiRoute("GET", OPENAPI_PATH, send)
    return route


def _build_operators(settings: ServeSettings, plane: ControlPlane) -> OperatorApi:
    """Build sign-in, controller and routes for operators, and the bootstrap token. Raises ConfigError."""
    folder, store, clock = settings.folder, plane.store, plane.clock
    doc = read_operators(folder)
    file = settings.state_dir / BOOTSTRAP_FILE
    if not file.exists():
        log.info("Operators sign in with the token in %s.", file)
    publisher = Publisher(folder, settings.keys)
    if (folder / TRUST_FILE).exists():  # without it nothing is signed or renewed
        publisher.check()
    # Devices whose polls wait in this process are woken after a plan was published.
    controller = Controller(store, folder, publisher, clock, published=plane.wakes.refresh, survey_s=settings.survey_s)
    issuer = None if doc.oidc is None else OidcClient(folder, doc, doc.oidc, clock)
    sign_in = SignIn(store, doc, load_bootstrap_token(file), clock, issuer)
    return OperatorApi(plane, publisher, controller, sign_in)
