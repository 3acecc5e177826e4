"""The controller's metrics. Alert on problems and on boxes ahead; only the process that leads has values above 0."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..controller.loop import Controller

METRICS = {
    "causeway_fleet_controller_leads": "1 in the process that runs the controller.",
    "causeway_fleet_controller_problems": "Reasons for which a plan is not published.",
    "causeway_fleet_boxes_ahead": "Boxes with newer metadata than the control plane, as after a restored backup.",
}


class ControllerCollector(Collector):
    """Reads the controller at each scrape."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterable[Metric]:
        leads, problems, ahead = METRICS.items()
        yield GaugeMetricFamily(*leads, value=int(self._controller.leads))
        yield GaugeMetricFamily(*problems, value=len(self._controller.problems))
        boxes = GaugeMetricFamily(*ahead, labels=["cohort"])
        for cohort, count in self._controller.ahead.items():
            boxes.add_metric([cohort], count)
        yield boxes
