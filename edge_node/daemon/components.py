"""The daemon's components, and their state as `/readyz` and as samples read at each Prometheus scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.listener import ConnectionTable
from causeway_server.router.serving.live.sessions import Sessions
from causeway_server.router.serving.metrics import MetricKind, Sample
from causeway_server.router.types import CloudSignals, DeviceSignals, Snapshot, Target

from ..backends.cloud.backend import Clouds
from ..backends.engine.engines import EnginePool
from ..clock import Clock
from ..files.store import DeviceFileStore
from ..http.api import RequestReader
from ..http.inspection import CloudState, Reachability, Readiness
from ..http.responses import DeviceResponses
from ..jobs.lazy_jobs import LazyJobs
from ..observability.metrics import Metrics
from ..parts import LazyAudio
from ..serving.requests import Admission, Records, SharedGenerations
from ..serving.service import Service
from ..serving.shadow import Shadows
from ..sessions import DeviceClient
from ..signals.collector import SignalCollector
from ..signals.estimators import LearnedEstimators
from ..storage.background_sqlite import SqliteStats
from ..storage.cache import AnswerCache
from ..storage.decisions import DecisionStore
from ..storage.policies import PolicyStore
from ..storage.responses import DeviceResponseStore
from ..storage.spend import SpendStore
from ..storage.state_folder import StateFolderLock

if TYPE_CHECKING:
    from causeway_server.router.serving.egress.ledger import EgressLedger

    from ..agent.link.connection import FleetConnection
    from ..mqtt.bridge import MqttBridge
    from ..observability.tracing import RequestTracer
    from ..serving.part_encoders import PartEncoders


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The backends that generate answers, and the signals about them."""

    engines: EnginePool | None
    clouds: Clouds
    egress: EgressLedger | None  # the ledger of what leaves for them
    encoders: PartEncoders | None  # encoders of audio and images; None on a device without them
    learned: LearnedEstimators
    spend: SpendStore
    signals: SignalCollector


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The service and its stores."""

    admission: Admission
    cache: AnswerCache
    decisions: DecisionStore
    records: Records
    service: Service
    shadows: Shadows
    shared_generations: SharedGenerations
    policies: PolicyStore


@dataclass(frozen=True, kw_only=True)
class WaysIn:
    """The parts from which requests come."""

    connections: tuple[ConnectionTable, ConnectionTable]  # open connections, over TCP and over the Unix socket
    reader: RequestReader
    files: DeviceFileStore
    response_store: DeviceResponseStore
    responses: DeviceResponses
    jobs: LazyJobs
    audio: LazyAudio
    sessions: Sessions[DeviceClient]
    mqtt: MqttBridge | None  # MQTT bridge; None without a configured broker
    tracing: RequestTracer | None


@dataclass(frozen=True, kw_only=True)
class Components(Backends, Serving, WaysIn):
    """The components that `build` constructs, and that the lifecycle starts and closes."""

    started: float  # time of the start, monotonic seconds
    clock: Clock
    metrics: Metrics
    state_folder: StateFolderLock
    keys: StateKeys | None  # keys of the state folder
    fleet: FleetConnection | None  # connection to the fleet; None on a device that has not joined a fleet
    fleet_problem: str  # reason why a device in a fleet has no connection

    def readiness(self) -> Readiness:
        """Return whether a target can answer: the engine is loaded, or the cloud is not known to be unreachable."""
        targets = self.policies.active.targets
        snapshot = self.signals.snapshot(self.policies.active)
        unusable = snapshot.down | snapshot.absent
        ready = any(one.key not in unusable for target in targets for one in target.in_each_cloud)
        awaited = [target for target in targets if _is_present(target, snapshot)] or targets
        signals = self.clouds.signals()
        states = tuple(CloudState(one.name, one.region, _reachability(signals[one.name])) for one in self.clouds)
        waiting = () if ready else tuple(f"target {target.name}" for target in awaited)
        return Readiness(
            ready=ready,
            waiting_for=waiting,
            problems=self.problems(),
            policy=self.policies.report,
            edge="" if self.engines is None else self.engines.state,
            cloud="" if not self.clouds else _best(one.state for one in states),
            clouds=states if len(states) > 1 else (),
            uptime_s=round(self.clock.monotonic() - self.started, 3),
        )

    def problems(self) -> tuple[str, ...]:
        """Return the problems for operators: missing models, the cloud, failed storage."""
        disks = (self.cache.disk(), self.decisions.disk(), self.spend.disk())
        problems = (
            *(() if self.engines is None else self.engines.problems),
            *self.clouds.problems,
            *(stats.problem for stats in disks if stats is not None),
            *self.state_folder.problems,
            *self.jobs.problems,
            *self.files.problems,
            *self.response_store.problems,
            *self.service.sessions.store.problems,
            *(() if self.mqtt is None else self.mqtt.problems),
            "" if self.egress is None else self.egress.problem,
            self.policies.persist_problem,
            *self.shadows.problems,
            *self.records.variants.problems,
            *(() if self.fleet is None else self.fleet.problems),
            *(() if self.reader.issuers is None else self.reader.issuers.problems),
            self.fleet_problem,
        )
        return tuple(problem for problem in problems if problem)

    def can_answer(self) -> bool:
        """Return whether the start is complete: a target's model is loaded, or its cloud is configured. An unreachable
        one counts as well: a device that boots without a network has started.
        """
        snapshot = self.signals.snapshot(self.policies.active)
        targets = self.policies.active.targets
        return any(
            _is_present(target, snapshot) and (target.at == "cloud" or target.key not in snapshot.down)
            for target in targets
        )


def _is_present(target: Target, snapshot: Snapshot) -> bool:
    return any(one.key not in snapshot.absent for one in target.in_each_cloud)


def _best(states: Iterable[Reachability]) -> Reachability:
    """Return the state of the clouds together: that of the best one."""
    order: tuple[Reachability, ...] = ("reachable", "unknown", "unreachable")
    return min(states, key=order.index)


def _reachability(cloud: CloudSignals) -> Reachability:
    if cloud.breaker == "open" or cloud.reachable is False:
        return "unreachable"
    return "unknown" if cloud.reachable is None else "reachable"


def read_samples(parts: Components) -> Iterator[Sample]:
    """Yield the samples of `/metrics`, read from the components at each scrape."""
    yield from _admission_samples(parts)
    yield from _device_samples(parts.signals.device)
    yield from parts.signals.energy.samples()
    yield from _storage_samples(parts)
    yield from _backend_samples(parts)
    yield from _connection_samples(parts)
    yield from _job_samples(parts.jobs)
    yield from _file_samples(parts.files)
    if parts.encoders is not None:
        yield from parts.encoders.samples()
    if parts.mqtt is not None:
        yield from parts.mqtt.samples()
    yield from parts.sessions.samples("causeway_edge_")
    yield from parts.shadows.samples()
    yield from parts.records.variants.samples()
    if parts.fleet is not None:
        yield _gauge("fleet_reachable", parts.fleet.reachable)
        yield _gauge("fleet_token", bool(parts.fleet.tokens.token))
        yield _counter("fleet_telemetry_lost", parts.fleet.telemetry.lost)
    for name, fault in () if parts.reader.issuers is None else parts.reader.issuers.faults.items():
        yield _gauge("issuer_unreachable", bool(fault), ("issuer", name))
    report = parts.policies.report
    yield _gauge("policy_info", 1, ("name", report.name), ("revision", report.revision))
    yield _gauge("policy_rejected", bool(report.refused))


def _gauge(name: str, value: float, *labels: tuple[str, str], kind: MetricKind = "gauge") -> Sample:
    return Sample(f"causeway_edge_{name}", float(value), labels, kind)


_counter = partial(_gauge, kind="counter")


def _admission_samples(parts: Components) -> Iterator[Sample]:
    yield _gauge("requests_running", parts.admission.running)
    yield _gauge("requests_queued", parts.admission.waiting)
    yield _gauge("shared_generations", len(parts.shared_generations))


def _device_samples(device: DeviceSignals) -> Iterator[Sample]:
    """Yield the last readings for the policy's signals; nothing is read for a scrape."""
    memory_mb = device.memory_free_mb
    readings = {
        "device_temperature_celsius": device.temperature_c,
        "device_throttled": device.throttled,
        "device_memory_free_bytes": None if memory_mb is None else memory_mb * 2**20,
        "device_cpu_ratio": device.cpu,
        "device_power_watts": device.power_w,
        "device_battery_ratio": device.battery,
    }
    for name, value in readings.items():
        if value is not None:
            yield _gauge(name, value)


def _storage_samples(parts: Components) -> Iterator[Sample]:
    yield _gauge("cache_entries", len(parts.cache))
    yield _gauge("cache_bytes", parts.cache.memory_bytes)
    disks = {"cache": parts.cache.disk(), "decisions": parts.decisions.disk(), "spend": parts.spend.disk()}
    stores = {
        name: disk or SqliteStats(lost_writes=0, corrupt_files=0, available=False) for name, disk in disks.items()
    }
    if (shadow := parts.shadows.disk()) is not None:
        stores["shadow"] = shadow
    for store, stats in stores.items():
        yield _counter("store_lost_writes", stats.lost_writes, ("store", store))
        yield _counter("store_corrupt_files", stats.corrupt_files, ("store", store))
        yield _gauge("store_available", stats.available, ("store", store))


def _backend_samples(parts: Components) -> Iterator[Sample]:
    if (engines := parts.engines) is not None:
        edge = engines.signals()
        yield _gauge("engine_loaded", bool(edge.loaded))
        if edge.queue is not None:
            yield _gauge("engine_requests_queued", edge.queue)
        for model, restarts in engines.restarts():
            yield _counter("engine_restarts", restarts, ("model", model))
        for model, unloads, is_unloaded in engines.unloads():
            yield _gauge("engine_unloaded", is_unloaded, ("model", model))
            yield _counter("engine_unloads", unloads, ("model", model))
    for cloud in parts.clouds:
        signals, label = cloud.signals(), ("cloud", cloud.name)
        yield _gauge("cloud_reachable", bool(signals.reachable), label)
        yield _gauge("cloud_breaker_open", signals.breaker == "open", label)
        yield _gauge("cloud_token_refused", cloud.health.token_refused, label)


def _job_samples(jobs: LazyJobs) -> Iterator[Sample]:
    if (stats := jobs.stats) is None:
        return
    yield _gauge("jobs_unfinished", stats.bulk, ("class", "bulk"))
    yield _gauge("jobs_unfinished", stats.unfinished - stats.bulk, ("class", "reserved"))
    yield _gauge("jobs_bytes", stats.bytes)
    yield _counter("jobs_accepted", stats.accepted)
    yield _counter("jobs_dropped", stats.dropped)
    for state, count in stats.ended.items():
        yield _counter("jobs_ended", count, ("state", state))
    yield _gauge("jobs_unreadable", stats.unreadable)
    yield _gauge("jobs_webhooks_waiting", stats.webhooks_due)
    yield _counter("jobs_webhooks_unreachable", jobs.unreachable)
    for outcome, count in stats.webhooks.items():
        yield _counter("jobs_webhooks", count, ("outcome", outcome))


def _file_samples(files: DeviceFileStore) -> Iterator[Sample]:
    stats = files.stats
    yield _gauge("files", stats.files)
    yield _gauge("files_bytes", stats.bytes)
    yield _counter("files_expired", stats.expired)


def _connection_samples(parts: Components) -> Iterator[Sample]:
    for table in parts.connections:
        stats = table.stats()
        yield _gauge("connections", stats.open, ("address", stats.address))
        yield _counter("closed_idle_connections", stats.closed_idle, ("address", stats.address))
        yield _counter("refused_connections", stats.refused, ("address", stats.address))
