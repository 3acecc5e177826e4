"""The components that the control plane's routes share, its background tasks, and the monitoring routes."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.manifest import WHOLE
from causeway_server.router.bundle.protocol import EnrolmentRequest
from causeway_server.router.errors import CausewayError, Draining
from causeway_server.router.serving.aiohttp_connection import json_response
from causeway_server.router.serving.metrics import Sample, SampleCollector

from ..controller.loop import Controller
from ..repository.fleet_file import FleetDoc
from ..rollout.rollout import Rollout
from ..store.database import GroupCommit, Store, StoreUnavailable
from ..store.devices import CohortCount, Device, forget_old_events, read_devices
from ..store.records import forget_old_records
from ..store.telemetry import forget_old_counters
from ..trust.certificates import Authority
from .connections import Connections
from .enrolment import Enrolling
from .messages import Answer, Messages, SignedMessage
from .refusals import DeviceUnknown
from .routes import ApiRoute
from .tokens import TokenKey
from .wakes import Wakes

_TIDY_S = 3600.0
_STEADY_S, _STEP_S = 6 * 3600.0, 60.0  # time without a step of the wall clock before rows are deleted
log = logging.getLogger(__name__)


class ControlPlane:
    """The components of a process of the control plane.

    Many messages, look-ups by id, enrolments or waiting readiness checks share a transaction each, so that a flood of
    one kind delays other writers only once. `clock`: Unix time, s. Without `authority` devices get no certificates.
    """

    def __init__(
        self,
        folder: Path,
        fleet: FleetDoc,
        store: Store,
        key: TokenKey,
        clock: Callable[[], float] = time.time,
        connections: Connections | None = None,
        authority: Authority | None = None,
    ) -> None:
        self.folder = folder
        self.fleet = fleet
        self.store = store
        self.key = key
        self.clock = clock
        self.authority = authority
        self._steady = SteadyClock()
        self.wakes = Wakes(store, clock, connections or Connections())
        messages = Messages(self.wakes.pace, clock, key.report_keys)
        self.messages: GroupCommit[SignedMessage, Answer] = GroupCommit(store.write, messages.handle)
        self.lookups: GroupCommit[str, Device] = GroupCommit(store.read, _find)
        enrolling = Enrolling(fleet, clock)
        self.enrolments: GroupCommit[EnrolmentRequest, Device] = GroupCommit(store.write, enrolling.handle)
        self.readiness: GroupCommit[None, None] = GroupCommit(store.read, _answers)

    async def run(self) -> None:
        """Handle messages, watch the generations, and delete old rows, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for grouped in (self.messages, self.lookups, self.enrolments, self.readiness):
                tasks.start_soon(grouped.run)
            tasks.start_soon(self.wakes.watch)
            tasks.start_soon(self._tidy)

    async def _tidy(self) -> None:
        while True:
            try:
                await self.tidy(time.monotonic())
            except StoreUnavailable as error:
                log.warning("Old rows could not be deleted and are kept for another hour: %s.", error.message)
            await anyio.sleep(_TIDY_S)

    async def tidy(self, monotonic: float) -> None:
        """Delete old rows, unless the wall clock has stepped recently against `monotonic`. Raises StoreUnavailable."""
        now = self.clock()
        if not self._steady.holds(now, monotonic):
            return
        async with self.store.write() as connection:
            await forget_old_events(connection, now)
            await forget_old_counters(connection, now)
            await forget_old_records(connection, now)


class SteadyClock:
    """Checks that the wall clock has not stepped against the monotonic clock for hours."""

    def __init__(self) -> None:
        self._offset = math.nan
        self._since = math.inf

    def holds(self, unix: float, monotonic: float) -> bool:
        """Return whether the clocks (seconds) have agreed for long enough. Call this about once an hour."""
        if not abs(unix - monotonic - self._offset) <= _STEP_S:  # true at the first call, too
            self._since = monotonic
        self._offset = unix - monotonic
        return monotonic - self._since >= _STEADY_S


async def _answers(connection: AsyncConnection, asked: Sequence[None]) -> Sequence[None]:
    await connection.execute(text("SELECT 1"))
    return asked


async def _find(connection: AsyncConnection, names: Sequence[str]) -> list[Device | CausewayError]:
    found = await read_devices(connection, set(names))
    return [found.get(name) or DeviceUnknown(f"The device {name!r} is not enrolled in this fleet.") for name in names]


def _samples(plane: ControlPlane, controller: Controller | None) -> Iterator[Sample]:
    """Yield the metrics. Alert on problems and devices ahead, which only the leader has above 0."""
    polls, messages = plane.wakes.polls, plane.messages
    yield Sample("causeway_fleet_parked_polls", polls.parked)
    yield Sample("causeway_fleet_refused_polls", polls.refused, kind="counter")
    yield Sample("causeway_fleet_connections", polls.connections.others)
    yield Sample("causeway_fleet_messages", messages.items, kind="counter")
    yield Sample("causeway_fleet_message_transactions", messages.transactions, kind="counter")
    if controller is None:
        return
    yield Sample("causeway_fleet_controller_leads", controller.leads)
    yield Sample("causeway_fleet_controller_problems", len(controller.problems))
    for cohort, count in controller.ahead.items():
        yield Sample("causeway_fleet_devices_ahead", count, (("cohort", cohort),))
    if controller.leads:
        yield from _cohort_samples(controller.counts, controller.rollouts)


def _cohort_samples(counts: Iterable[CohortCount], rollouts: Iterable[Rollout]) -> Iterator[Sample]:
    """Yield the metrics of the last survey, which only the leader has."""
    runs = {rollout.cohort: rollout.to_bundle for rollout in rollouts}
    figures: Counter[tuple[str, str]] = Counter()
    for count in counts:
        figures["causeway_fleet_devices", count.cohort] += count.devices
        figures["causeway_fleet_devices_recently_seen", count.cohort] += count.recently_seen
        if (bundle := runs.get(count.cohort)) is not None:
            figures["causeway_fleet_rollout_devices", count.cohort] += count.devices * (count.running == bundle)
    for (name, cohort), figure in figures.items():
        yield Sample(name, figure, (("cohort", cohort),))
    for rollout in rollouts:
        labels = (("cohort", rollout.cohort),)
        yield Sample("causeway_fleet_rollout_share_ratio", rollout.share / WHOLE, labels)
        yield Sample("causeway_fleet_rollout_info", 1, (*labels, ("state", rollout.state.value)))


def health_routes(plane: ControlPlane, controller: Controller | None = None) -> list[ApiRoute]:
    """Return the monitoring routes. `controller`: the controller, for its metrics; None without operators."""
    registry = CollectorRegistry()
    registry.register(SampleCollector(partial(_samples, plane, controller)))

    async def healthz(_http: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def readyz(_http: web.Request) -> web.StreamResponse:
        if plane.wakes.closing:
            raise Draining("The control plane is shutting down.")
        await plane.readiness.submit(None)
        return json_response({"status": "ready"})

    async def metrics(_http: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    return [
        ApiRoute("GET", "/healthz", healthz),
        ApiRoute("GET", "/readyz", readyz),
        ApiRoute("GET", "/metrics", metrics),
    ]
