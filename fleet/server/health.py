"""/healthz: the process answers. /readyz: it can serve boxes. /metrics: for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.errors import Draining
from router.serving.responses import json_response

from ..controller.loop import Controller
from ..store.database import StoreUnavailable
from .plane import ControlPlane
from .routes import ApiRoute

_METRICS = {
    "causeway_fleet_parked_polls": "Polls that wait for something new.",
    "causeway_fleet_refused_polls": "Polls that were answered at once, as there was no room to park them.",
    "causeway_fleet_connections": "Connections that are not parked.",
    "causeway_fleet_messages": "Signed messages of boxes that were handled.",
    "causeway_fleet_message_transactions": "Transactions that they took.",
}
# Alert on problems and on boxes ahead; only the process that leads has values above 0.
_CONTROLLER_METRICS = {
    "causeway_fleet_controller_leads": "1 in the process that runs the controller.",
    "causeway_fleet_controller_problems": "Reasons for which a plan is not published.",
    "causeway_fleet_boxes_ahead": "Boxes with newer metadata than the control plane, as after a restored backup.",
}


class _PlaneCollector(Collector):
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterable[Metric]:
        plane, values = self._plane, list(_METRICS.items())
        yield GaugeMetricFamily(*values[0], value=plane.wakes.polls.parked)
        yield CounterMetricFamily(*values[1], value=plane.wakes.polls.refused)
        yield GaugeMetricFamily(*values[2], value=plane.wakes.polls.connections.others)
        yield CounterMetricFamily(*values[3], value=plane.messages.items)
        yield CounterMetricFamily(*values[4], value=plane.messages.transactions)


class _ControllerCollector(Collector):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterable[Metric]:
        leads, problems, ahead = _CONTROLLER_METRICS.items()
        yield GaugeMetricFamily(*leads, value=int(self._controller.leads))
        yield GaugeMetricFamily(*problems, value=len(self._controller.problems))
        boxes = GaugeMetricFamily(*ahead, labels=["cohort"])
        for cohort, count in self._controller.ahead.items():
            boxes.add_metric([cohort], count)
        yield boxes


def health_routes(plane: ControlPlane, controller: Controller | None = None) -> list[ApiRoute]:
    """Return the three routes. `controller`: of the operators' side, for its metrics."""
    registry = CollectorRegistry()
    registry.register(_PlaneCollector(plane))
    if controller is not None:
        registry.register(_ControllerCollector(controller))

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
