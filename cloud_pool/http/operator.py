"""The operators' address: metrics, readiness in detail, and calls that change this process.

    GET  /metrics   Prometheus
    GET  /readyz    as the public one, with each tier's and endpoint's state, why jobs are refused, and problems
    POST /reload    read endpoints and variants of the configuration again, as SIGHUP does
    POST /drain     accept no more requests; running ones end. The process stays until it is stopped.
    /dlq            dead letters, where the process accepts jobs (`jobs.http.dead_letter_api`)

Every request needs a token of `operator.token_file`, or a signed one with the scope `admin`. If neither is configured,
the address is on loopback, GET of /metrics and /readyz is free for probes, and all other requests need the token of the
file that the process creates at start (`accounts.identity.operator_token`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from causeway_server.router.errors import CausewayError, ConfigError, InvalidRequest, MethodNotAllowed, NotFound
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.metrics import CONTENT_TYPE
from causeway_server.router.serving.request import AiohttpRequest, allowed_methods, served_method
from causeway_server.router.serving.responses import (
    Handler,
    ServerResponse,
    body_response,
    error_response,
    json_response,
)

from ..accounts.identity.authenticator import Authenticator
from ..observability.metrics import Metrics
from .info_routes import Readiness
from .server import Server

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 64
_PROBES = frozenset({("GET", "/metrics"), ("GET", "/readyz")})
_Handler = Callable[[], Awaitable[ServerResponse]]


class OperatorRoutes(msgspec.Struct, frozen=True):
    """The handlers of the operators' address. Routes whose field is None do not exist in this process: 404."""

    authenticator: Authenticator
    metrics: Metrics
    free_probes: bool  # whether GET of /metrics and /readyz needs no token
    readiness: Readiness | None = None
    jobs_refused: Callable[[], str] = lambda: ""  # why no job is accepted now; "" if jobs are
    reload: Callable[[], None] | None = None  # reads the endpoints again; raises ConfigError
    server: Server | None = None  # accepts no more requests from POST /drain on
    more: Callable[[AiohttpRequest], Handler | None] = lambda _: None  # of further paths; None: no such path

    @property
    def _routes(self) -> Mapping[str, tuple[str, _Handler]]:
        known: tuple[tuple[str, str, _Handler, object], ...] = (
            ("/metrics", "GET", self._get_metrics, self.metrics),
            ("/readyz", "GET", self._get_readiness, self.readiness),
            ("/reload", "POST", self._post_reload, self.reload),
            ("/drain", "POST", self._post_drain, self.server),
        )
        return {path: (method, handler) for path, method, handler, part in known if part is not None}

    async def handle(self, http: AiohttpRequest) -> ServerResponse:
        """Handle one request. Every error becomes OpenAI's error object."""
        try:
            return await self._handler(http)()
        except CausewayError as error:
            return error_response(error)
        except Exception as error:
            log.error("An operator's request failed unexpectedly: %s", redacted(error))
            return error_response(CausewayError("The process failed."))

    def _handler(self, http: AiohttpRequest) -> _Handler:
        """Return the handler. Raises AuthenticationFailed, PermissionDenied, NotFound or MethodNotAllowed."""
        method, handler = self._routes.get(http.path, ("", None))
        sent = served_method(http.method, http.headers)
        if handler is not None and self.free_probes and (sent, http.path) in _PROBES:
            return handler
        caller = self.authenticator.identify(http)
        caller.require("admin")
        if handler is None and (further := self.more(http)) is not None:
            if sent != "GET":
                log.warning("%s %s was called by the operator %s", http.method, http.path, caller.owner)
            return partial(further, http)
        if handler is None:
            raise NotFound(f"There is nothing at {http.path[:128]}. Use {', '.join(self._routes)}.")
        if sent != method:
            allowed = allowed_methods(method)
            raise MethodNotAllowed(f"{http.method[:20]} is not allowed here. Use {allowed}.", allow=allowed)
        if method == "POST":
            log.warning("%s by %s", http.path, caller.owner)
        return handler

    async def _get_metrics(self) -> ServerResponse:
        return body_response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_readiness(self) -> ServerResponse:
        assert self.readiness is not None
        draining = self.server is not None and self.server.draining
        checked = {} if draining else await self.readiness.check()
        ready = not draining and await self.readiness.ready()
        tiers = {
            name: {"ready": tier.ready, "error": tier.error, "endpoints": tier.endpoints}
            for name, tier in checked.items()
        }
        found = {
            "ready": ready,
            "draining": draining,
            "tiers": tiers,
            "jobs_refused": self.jobs_refused(),
            "problems": self.readiness.problems(),
        }
        return json_response(found, 200 if ready else 503)

    async def _post_reload(self) -> ServerResponse:
        assert self.reload is not None
        try:
            self.reload()
        except ConfigError as error:
            raise InvalidRequest(f"The configuration is faulty, so the endpoints stay unchanged: {error}") from None
        return json_response({"reloaded": True})

    async def _post_drain(self) -> ServerResponse:
        assert self.server is not None
        self.server.begin_draining()
        return json_response({"draining": True})
