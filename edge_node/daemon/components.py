"""The daemon's components, and their state as `/readyz` and as gauges read at each Prometheus scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from causeway_server.router.serving.listener import ConnectionTable
from causeway_server.router.serving.live.sessions import Sessions
from causeway_server.router.serving.metrics import Gauge
from causeway_server.router.types import CloudSignals

from ..backends.cloud.backend import CloudBackend
from ..backends.engine.engines import EnginePool
from ..clock import Clock
from ..files.store import DeviceFileStore
from ..http.api import RequestReader
from ..http.inspection import Reachability, Readiness
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
from ..storage.spend import SpendStore
from ..storage.state_folder import StateFolderLock

if TYPE_CHECKING:
    from ..agent.link.connection import FleetConnection
    from ..mqtt.bridge import MqttBridge
    from ..observability.tracing import RequestTracer
    from ..serving.part_encoders import PartEncoders

_LOST = "Writes that were dropped because the disk was full, slow or failing."
_counter = partial(Gauge, is_counter=True)


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The backends that generate answers, and the signals about them."""

    engines: EnginePool | None
    cloud: CloudBackend | None
    encoders: PartEncoders | None  # None on a device without one
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
    """The sources of requests."""

    connections: tuple[ConnectionTable, ConnectionTable]  # over TCP, over the Unix socket
    reader: RequestReader
    files: DeviceFileStore
    jobs: LazyJobs
    audio: LazyAudio
    sessions: Sessions[DeviceClient]
    mqtt: MqttBridge | None  # None without a configured broker
    tracing: RequestTracer | None


@dataclass(frozen=True, kw_only=True)
class Components(Backends, Serving, WaysIn):
    """The components that `build` constructs, and that the lifecycle starts and closes."""

    started: float  # monotonic s
    clock: Clock
    metrics: Metrics
    state_folder: StateFolderLock
    fleet: FleetConnection | None  # None on a device that has not joined a fleet
    fleet_problem: str  # why a device in a fleet has no connection

    def readiness(self) -> Readiness:
        """Return whether a target can answer: the engine is loaded, or the cloud is not known to be unreachable."""
        targets = self.policies.active.targets
        snapshot = self.signals.snapshot(self.policies.active)
        unusable = snapshot.down | snapshot.absent
        ready = any(target.name not in unusable for target in targets)
        awaited = [target for target in targets if target.name not in snapshot.absent] or targets
        waiting = () if ready else tuple(f"target {target.name}" for target in awaited)
        return Readiness(
            ready=ready,
            waiting_for=waiting,
            problems=self.problems(),
            policy=self.policies.report,
            edge="" if self.engines is None else self.engines.state,
            cloud="" if self.cloud is None else _reachability(self.cloud.signals()),
            uptime_s=round(self.clock.monotonic() - self.started, 3),
        )

    def problems(self) -> tuple[str, ...]:
        """Return the problems for operators: missing models, the cloud, failed storage."""
        disks = (self.cache.disk(), self.decisions.disk(), self.spend.disk())
        problems = (
            *(() if self.engines is None else self.engines.problems),
            *(() if self.cloud is None else self.cloud.health.problems),
            *(stats.problem for stats in disks if stats is not None),
            *self.state_folder.problems,
            *self.jobs.problems,
            *self.files.problems,
            *(() if self.mqtt is None else self.mqtt.problems),
            self.policies.persist_problem,
            *self.shadows.problems,
            *self.records.variants.problems,
            *(() if self.fleet is None else self.fleet.problems),
            self.fleet_problem,
        )
        return tuple(problem for problem in problems if problem)

    def can_answer(self) -> bool:
        """Return whether the start is complete: a model is loaded, or a cloud is configured, for a target of the
        policy.

        An unreachable cloud counts as well: a device that boots without a network has started.
        """
        snapshot = self.signals.snapshot(self.policies.active)
        targets = self.policies.active.targets
        return any(
            target.name not in snapshot.absent and (target.at == "cloud" or target.name not in snapshot.down)
            for target in targets
        )


def _reachability(cloud: CloudSignals) -> Reachability:
    if cloud.breaker == "open" or cloud.reachable is False:
        return "unreachable"
    return "unknown" if cloud.reachable is None else "reachable"


def read_gauges(parts: Components) -> Iterator[Gauge]:
    """Yield the gauges of `/metrics`, read from the components at each scrape."""
    yield from _admission_gauges(parts)
    yield from _storage_gauges(parts)
    yield from _backend_gauges(parts)
    yield from _connection_gauges(parts)
    yield from _job_gauges(parts.jobs)
    yield from _file_gauges(parts.files)
    if parts.encoders is not None:
        yield from parts.encoders.gauges()
    if parts.mqtt is not None:
        yield from parts.mqtt.gauges()
    yield from parts.sessions.gauges("causeway_edge_")
    yield from parts.shadows.gauges()
    yield from parts.records.variants.gauges()
    if parts.fleet is not None:
        yield from _fleet_gauges(parts.fleet)
    report = parts.policies.report
    labels = (("name", report.name), ("revision", report.revision))
    yield Gauge("causeway_edge_policy_info", "The active policy; always 1.", 1.0, labels)
    refused = float(bool(report.refused))
    yield Gauge("causeway_edge_policy_rejected", "1: the newest policy file was rejected.", refused)


def _admission_gauges(parts: Components) -> Iterator[Gauge]:
    stats = parts.admission
    yield Gauge("causeway_edge_requests_running", "Requests being generated now.", stats.running)
    yield Gauge("causeway_edge_requests_queued", "Requests waiting for admission.", stats.waiting)
    yield Gauge(
        "causeway_edge_shared_generations",
        "Generations in progress that identical requests may share.",
        len(parts.shared_generations),
    )


def _storage_gauges(parts: Components) -> Iterator[Gauge]:
    cache = parts.cache
    yield Gauge("causeway_edge_cache_entries", "Cache entries in memory.", len(cache))
    yield Gauge("causeway_edge_cache_bytes", "Bytes of the cache in memory.", cache.memory_bytes)
    for store, stats in (("cache", cache.disk()), ("decisions", parts.decisions.disk()), ("spend", parts.spend.disk())):
        yield from _sqlite_gauges(store, stats or SqliteStats(lost_writes=0, corrupt_files=0, available=False))
    if (shadow := parts.shadows.disk()) is not None:
        yield from _sqlite_gauges("shadow", shadow)


def _sqlite_gauges(store: str, stats: SqliteStats) -> Iterator[Gauge]:
    labels = (("store", store),)
    yield _counter("causeway_edge_store_lost_writes", _LOST, stats.lost_writes, labels)
    yield _counter(
        "causeway_edge_store_corrupt_files",
        "Corrupt database files that were set aside and replaced.",
        stats.corrupt_files,
        labels,
    )
    yield Gauge(
        "causeway_edge_store_available", "1: the store writes to disk; 0: memory only.", float(stats.available), labels
    )


def _backend_gauges(parts: Components) -> Iterator[Gauge]:
    if (engines := parts.engines) is not None:
        edge = engines.signals()
        yield Gauge(
            "causeway_edge_engine_loaded",
            "1: the edge model is loaded, or is as soon as a request needs it.",
            float(bool(edge.loaded)),
        )
        if edge.queue is not None:
            yield Gauge("causeway_edge_engine_requests_queued", "Requests waiting in the engine.", edge.queue)
        for model, restarts in engines.restarts():
            labels = (("model", model),)
            yield _counter(
                "causeway_edge_engine_restarts", "Engine processes that were restarted, by model.", restarts, labels
            )
        for model, unloads, is_unloaded in engines.unloads():
            labels = (("model", model),)
            yield Gauge(
                "causeway_edge_engine_unloaded",
                "1: the model left memory for want of requests, and the next one loads it; by model.",
                float(is_unloaded),
                labels,
            )
            yield _counter(
                "causeway_edge_engine_unloads",
                "Times that a model left memory for want of requests, by model.",
                unloads,
                labels,
            )
    if parts.cloud is not None:
        cloud, health = parts.cloud.signals(), parts.cloud.health
        reachable, is_open = float(bool(cloud.reachable)), float(cloud.breaker == "open")
        refused = float(health.token_refused)
        yield Gauge("causeway_edge_cloud_reachable", "1: the last probe of the cloud succeeded.", reachable)
        yield Gauge("causeway_edge_cloud_breaker_open", "1: the circuit breaker of the cloud is open.", is_open)
        yield Gauge("causeway_edge_cloud_token_refused", "1: the cloud refuses the token (HTTP 401).", refused)


def _job_gauges(jobs: LazyJobs) -> Iterator[Gauge]:
    if (stats := jobs.stats) is None:
        return
    bulk, others = (("class", "bulk"),), (("class", "reserved"),)
    yield Gauge("causeway_edge_jobs_unfinished", "Jobs that have not ended, by class.", stats.bulk, bulk)
    yield Gauge(
        "causeway_edge_jobs_unfinished", "Jobs that have not ended, by class.", stats.unfinished - stats.bulk, others
    )
    yield Gauge("causeway_edge_jobs_bytes", "Bytes of the requests and results of jobs.", stats.bytes)
    yield _counter("causeway_edge_jobs_accepted", "Jobs that were accepted.", stats.accepted)
    yield _counter("causeway_edge_jobs_dropped", "Bulk jobs that gave way to newer jobs.", stats.dropped)
    for state, count in stats.ended.items():
        labels = (("state", state),)
        yield _counter("causeway_edge_jobs_ended", "Jobs that ended, by state.", count, labels)
    yield Gauge(
        "causeway_edge_jobs_unreadable",
        "Jobs that this version cannot read (damaged, or of a newer version), kept as long as dead letters.",
        stats.unreadable,
    )
    yield Gauge("causeway_edge_jobs_webhooks_waiting", "Webhooks that are to be sent.", stats.webhooks_due)
    yield _counter(
        "causeway_edge_jobs_webhooks_unreachable",
        "Attempts to send a webhook without a connection to its receiver.",
        jobs.unreachable,
    )
    for outcome, count in stats.webhooks.items():
        yield _counter(
            "causeway_edge_jobs_webhooks",
            "Webhooks that are not sent any more, by outcome: delivered, failed, disabled (the receiver answered 410), "
            "expired (their receiver was away too long), lost (their job was deleted).",
            count,
            (("outcome", outcome),),
        )
    for outcome, count in stats.revisions.items():
        labels = (("outcome", outcome),)
        yield _counter(
            "causeway_edge_jobs_revisions",
            "Revisions of answers, by outcome: made, too_late (the part was not read in time, or the deadline passed), "
            "failed (the part could not be read, or the run failed), cancelled, no_room (too many answers wait for "
            "late parts).",
            count,
            labels,
        )


def _file_gauges(files: DeviceFileStore) -> Iterator[Gauge]:
    stats = files.stats
    yield Gauge("causeway_edge_files", "Uploaded files.", stats.files)
    yield Gauge("causeway_edge_files_bytes", "Bytes of the uploaded files.", stats.bytes)
    yield _counter("causeway_edge_files_expired", "Uploaded files that expired.", stats.expired)


def _fleet_gauges(fleet: FleetConnection) -> Iterator[Gauge]:
    yield Gauge("causeway_edge_fleet_reachable", "1: the fleet's control plane answered last.", float(fleet.reachable))
    yield Gauge(
        "causeway_edge_fleet_token", "1: the device has a valid token of its fleet.", float(bool(fleet.tokens.token))
    )
    yield _counter(
        "causeway_edge_fleet_telemetry_lost",
        "Minutes of telemetry that were dropped because a day of them waited.",
        fleet.telemetry.lost,
    )


def _connection_gauges(parts: Components) -> Iterator[Gauge]:
    for table in parts.connections:
        stats = table.stats()
        labels = (("address", stats.address),)
        yield Gauge("causeway_edge_connections", "Open connections, by address (tcp, unix).", stats.open, labels)
        yield _counter(
            "causeway_edge_closed_idle_connections",
            "Idle connections that were closed to make room for new ones.",
            stats.closed_idle,
            labels,
        )
        yield _counter(
            "causeway_edge_refused_connections",
            "Connections refused because every other one had a request in progress.",
            stats.refused,
            labels,
        )
