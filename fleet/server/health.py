"""/healthz: the process answers. /readyz: it can serve boxes. /metrics: for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from router.errors import Draining
from router.serving.gauges import Gauge, GaugeCollector
from router.serving.responses import json_response

from ..controller.loop import Controller
from ..store.database import StoreUnavailable
from .plane import ControlPlane
from .routes import ApiRoute


def _plane_gauges(plane: ControlPlane) -> Iterator[Gauge]:
    polls, messages = plane.wakes.polls, plane.messages
    yield Gauge("causeway_fleet_parked_polls", "Polls that wait for something new.", polls.parked)
    text = "Polls that were answered at once, as there was no room to park them."
    yield Gauge("causeway_fleet_refused_polls", text, polls.refused, is_counter=True)
    yield Gauge("causeway_fleet_connections", "Connections that are not parked.", polls.connections.others)
    text = "Signed messages of boxes that were handled."
    yield Gauge("causeway_fleet_messages", text, messages.items, is_counter=True)
    text = "Transactions that they took."
    yield Gauge("causeway_fleet_message_transactions", text, messages.transactions, is_counter=True)


def _controller_gauges(controller: Controller) -> Iterator[Gauge]:
    """Alert on problems and on boxes ahead; only the process that leads has values above 0."""
    yield Gauge("causeway_fleet_controller_leads", "1 in the process that runs the controller.", controller.leads)
    text = "Reasons for which a plan is not published."
    yield Gauge("causeway_fleet_controller_problems", text, len(controller.problems))
    text = "Boxes with newer metadata than the control plane, as after a restored backup."
    for cohort, count in controller.ahead.items():
        yield Gauge("causeway_fleet_boxes_ahead", text, count, (("cohort", cohort),))


def health_routes(plane: ControlPlane, controller: Controller | None = None) -> list[ApiRoute]:
    """Return the three routes. `controller`: of the operators' side, for its metrics."""
    registry = CollectorRegistry()
    registry.register(GaugeCollector(partial(_plane_gauges, plane)))
    if controller is not None:
        registry.register(GaugeCollector(partial(_controller_gauges, controller)))

    async def healthz(_http: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def readyz(_http: web.Request) -> web.StreamResponse:
        if plane.wakes.closing:
            raise Draining("the control plane is shutting down")
        await plane.readiness.submit(None)
        return json_response({"status": "ready"})

    async def metrics(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    ready = (Draining, StoreUnavailable)
    return [
        ApiRoute("GET", "/healthz", healthz, "The process answers.", response=dict[str, str]),
        ApiRoute("GET", "/readyz", readyz, "Boxes can be served.", response=dict[str, str], errors=ready),
        ApiRoute("GET", "/metrics", metrics, "Metrics for Prometheus.", content_type="text/plain"),
    ]
