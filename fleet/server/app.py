"""One aiohttp application of all routes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import msgspec
from aiohttp import hdrs, web
from prometheus_client.registry import Collector

from router.api import OPENAPI_PATH
from router.bundle.protocol import MAX_MESSAGE_BYTES

from ..console.routes import console_routes
from .boxes.api import device_routes
from .files import file_routes
from .health import health_routes
from .openapi import fleet_document
from .plane import ControlPlane
from .routes import ApiRoute, Unfinished, errors_as_json, nothing_here

_DRAIN_S = 5.0  # that handlers get to finish when the server stops


def all_routes(
    plane: ControlPlane, more: Sequence[ApiRoute] = (), collectors: Sequence[Collector] = ()
) -> list[ApiRoute]:
    """Return every route of the control plane with `/openapi.json`; `more`, `collectors`: the operators' side."""
    files = [*file_routes(plane.folder / "published"), *console_routes()]
    routes = [*device_routes(plane), *files, *health_routes(plane, collectors), *more]
    return [*routes, _openapi(routes)]


def build_app(routes: Sequence[ApiRoute]) -> web.Application:
    """Return the application with these routes. Bodies have at most MAX_MESSAGE_BYTES, errors are JSON."""
    app = web.Application(client_max_size=MAX_MESSAGE_BYTES)
    unfinished = Unfinished()
    for route in routes:
        handler = route.handler if route.parks else unfinished.finished(route.handler)
        app.router.add_route(route.method, route.path, errors_as_json(handler))
        if route.method == hdrs.METH_GET:
            app.router.add_route(hdrs.METH_HEAD, route.path, errors_as_json(handler))
    app.router.add_route("*", "/{path:.*}", nothing_here)

    async def drain(_app: web.Application) -> None:
        await unfinished.wait(_DRAIN_S)

    app.on_cleanup.append(drain)
    return app


def _openapi(routes: Sequence[ApiRoute]) -> ApiRoute:
    async def send(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    route = ApiRoute("GET", OPENAPI_PATH, send, "This document.", response=dict)
    body = msgspec.json.encode(fleet_document([*routes, route], version("causeway")))
    return route
