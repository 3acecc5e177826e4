"""The daemon's lifecycle: start, background tasks, drain, close; and its notifications to systemd.

One task is the parent of all others (shared generations, engines, periodic tasks): when it ends, they have ended. If it
ends early, the daemon closes and `serve` ends with `failed` set, so that the supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from causeway_server.router.serving.addresses import raise_file_limit
from causeway_server.router.serving.listener import Address, ConnectionTable, Listener
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.process import tune_garbage_collector
from causeway_server.router.serving.request import PLAIN
from causeway_server.router.serving.tls.contexts import server_tls
from causeway_server.router.web_origins import WebOrigins, listener_hosts

from ..config.schema import Config
from ..http.api import Api
from ..http.inspection import PLAIN_PATHS
from .components import Components
from .state_encryption import open_folder, rotate_keys

if TYPE_CHECKING:
    from ..agent.agent import Agent

log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_POLL_S = 2.0
_SWEEP_S = 5.0
_ROTATION_S = 60.0
_READY_POLL_S = 0.05
_STARTING_S = 5.0  # interval of messages to systemd while no target can answer
_EXTENSION_S = 60  # time for the start, requested from systemd


class StopRequest:
    """A request to stop the daemon: from a signal, or from its agent to restart with the settings of another bundle."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.restarting = False

    def restart(self) -> None:
        """Let `serve` drain, close and end, to be restarted."""
        self.restarting = True
        self.requested.set()


@dataclass(eq=False, repr=False)  # the configuration may contain a key
class App:
    """A daemon, made by `edge_node.app.build`. `agent`: None on a device that has not joined a fleet; `paths`: the
    methods of each path; `failed`: whether a background task ended early, and the daemon with it.
    """

    config: Config  # the daemon's configuration, with the settings of its bundle
    parts: Components
    api: Api
    notifier: SystemdNotifier
    agent: Agent | None
    stop_request: StopRequest

    def __post_init__(self) -> None:
        self.paths = self.api.paths
        self._listener = Listener(
            self.api.handle,
            _addresses(self.config, *self.parts.connections),
            self.config.server.read_timeout_s,
            (*PLAIN, *PLAIN_PATHS),
            direct=self.api.begin,
        )
        self._stop = asyncio.Event()
        self.failed = False
        self._reload_requested = asyncio.Event()  # set by SIGHUP
        self._listening = asyncio.Event()
        self._ready = asyncio.Event()  # set when a target can answer
        self._root: asyncio.Task[None] | None = None

    @property
    def port(self) -> int | None:
        """The TCP port; None before `start`, or without TCP."""
        return self._listener.port

    @property
    def in_flight(self) -> int:
        """Number of HTTP requests in progress."""
        return self._listener.in_flight

    @property
    def restarting(self) -> bool:
        """Whether the caller must restart the daemon after `serve`, with the settings of another bundle."""
        return self.stop_request.restarting

    async def start(self) -> None:
        """Start everything and listen. Requests may arrive at once; they wait for the engine within their deadlines.
        Raises ConfigError if an address, the policy, a certificate or the state folder cannot be used; all is closed
        again.
        """
        parts = self.parts
        raise_file_limit()
        parts.state_folder.acquire()
        try:
            if parts.keys is not None:
                await asyncio.to_thread(open_folder, parts.keys)
            parts.policies.load()
            if parts.egress is not None:
                parts.egress.start()
        except BaseException:
            parts.state_folder.release()
            raise
        parts.signals.sample()
        parts.cache.start()
        parts.decisions.start()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await parts.spend.load()
            await parts.signals.energy.load()
            if parts.admission.budgets is not None:
                await parts.admission.budgets.load()
            await parts.service.sessions.store.load()
            await parts.files.start()
            self._root = asyncio.create_task(self._run_tasks(started), name="causeway-edge")
            self._root.add_done_callback(functools.partial(self._root_ended, started))
            await parts.clouds.start()
            await started
            await self._listener.start()
        except BaseException:
            await self.close()
            raise
        self._listening.set()
        log.info(
            "Listening on port %s%s.", self.port, f" and {self.config.server.socket}" * bool(self.config.server.socket)
        )

    def _root_ended(self, started: asyncio.Future[None], root: asyncio.Task[None]) -> None:
        """End the daemon when its background tasks end, because without them it would no longer repair faults."""
        if self._stop.is_set() or root.cancelled():
            return
        error = root.exception() or RuntimeError("The background tasks ended.")
        log.critical("A background task failed, and the daemon ends: %s", redacted(_first_cause(error)))
        self.failed = True
        self.notifier.stopping("a background task failed")
        self.stop_request.requested.set()
        if not started.done():
            started.set_exception(error)

    async def drain(self) -> bool:
        """Refuse new requests and wait for those in progress. Return False if some are left at the timeout."""
        log.info("Draining for up to %g s. Requests in progress: %d.", self.config.server.drain_s, self.in_flight)
        if self.stop_request.restarting:
            self.notifier.reloading("Draining, to restart with other settings")
        else:
            self.notifier.stopping("draining")
        self.parts.admission.drain()
        self.parts.sessions.drain()
        self.parts.shadows.stop()
        self._listener.stop_accepting()
        return await self._listener.drain(self.config.server.drain_s)

    async def close(self) -> None:
        """Cancel the requests in progress and release everything."""
        parts = self.parts
        parts.admission.end()
        parts.shadows.stop()
        if self.in_flight:
            log.warning("Requests cut off at the end of the drain: %d. Their clients get an error.", self.in_flight)
        await parts.sessions.close()
        await self._listener.close()
        self._stop.set()
        if self._root is not None:
            await asyncio.wait([self._root])
        for part in (parts.audio, parts.encoders, parts.engines, parts.clouds, parts.fleet, parts.reader.issuers):
            if part is not None:
                await part.close()
        parts.decisions.settle()
        await asyncio.to_thread(self._close_stores)

    def _close_stores(self) -> None:
        self.parts.jobs.close()
        self.parts.files.close()
        self.parts.response_store.close()
        self.parts.service.sessions.store.close()
        self.parts.cache.close()
        self.parts.decisions.close()
        self.parts.shadows.close()
        self.parts.records.variants.save()
        self.parts.signals.energy.save()
        self.parts.spend.close()
        if self.parts.egress is not None:
            self.parts.egress.close()
        if self.parts.tracing is not None:
            self.parts.tracing.close()
        self.parts.state_folder.release()

    async def serve(
        self, *, on_listening: Callable[[App], None] = lambda _: None, on_ready: Callable[[App], None] = lambda _: None
    ) -> None:
        """Start, answer until SIGTERM or SIGINT, drain, close. SIGHUP reloads the policy.

        A background task that ends early closes the daemon without a drain, and `failed` is set. `on_listening` is
        called after `start`, `on_ready` once a target can answer, as systemd is notified. A SIGINT during the drain
        ends it at once. Further SIGTERMs are ignored: the kernel sends one for each thread of a parent that dies
        (prctl(2), PR_SET_PDEATHSIG).
        """
        loop = asyncio.get_running_loop()
        stop_requested, abort_requested = self.stop_request.requested, asyncio.Event()

        def terminate() -> None:
            if not stop_requested.is_set():
                log.info("SIGTERM received.")
            self.stop_request.restarting = False
            stop_requested.set()

        def interrupt() -> None:
            log.info("SIGINT received%s.", ": the drain ends now" * stop_requested.is_set())
            self.stop_request.restarting = False
            (abort_requested if stop_requested.is_set() else stop_requested).set()

        await self.start()
        try:
            loop.add_signal_handler(signal.SIGTERM, terminate)
            loop.add_signal_handler(signal.SIGINT, interrupt)
            loop.add_signal_handler(signal.SIGHUP, self._reload_requested.set)
            tune_garbage_collector()
            on_listening(self)
            async with anyio.create_task_group() as serving:
                serving.start_soon(self._call_when_ready, on_ready)
                await stop_requested.wait()
                serving.cancel_scope.cancel()
            if self.failed:
                return
            async with anyio.create_task_group() as draining:
                draining.start_soon(_cancel_after, abort_requested, draining.cancel_scope)
                await self.drain()
                draining.cancel_scope.cancel()
        finally:
            await self.close()
            log.info("Stopped.")

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _run_tasks(self, started: asyncio.Future[None]) -> None:
        """Run the parent of all tasks: shared generations, engines, periodic tasks."""
        parts = self.parts
        async with anyio.create_task_group() as tasks:
            parts.shared_generations.start(tasks)
            parts.sessions.start(tasks)
            if parts.engines is not None:
                parts.engines.start(tasks)
            for cloud in parts.clouds:
                tasks.start_soon(_every, 0.0, cloud.watch)
            tasks.start_soon(_every, _SAMPLE_S, parts.signals.sample)
            tasks.start_soon(_every, _POLL_S, parts.policies.poll)
            tasks.start_soon(_every, _SWEEP_S, parts.files.sweep)
            tasks.start_soon(_every, 0.0, self._reload)
            if parts.keys is not None:
                rotate = functools.partial(rotate_keys, parts.keys, parts.files, self.config.encryption.rotate_s)
                tasks.start_soon(_every, _ROTATION_S, rotate)
            if self.notifier.watchdog_s is not None:
                tasks.start_soon(_every, self.notifier.watchdog_s, self._ping_watchdog)
            tasks.start_soon(parts.shadows.run)
            tasks.start_soon(self._announce_ready)
            if self.agent is not None:
                tasks.start_soon(self.agent.run)
            if parts.fleet is not None:
                tasks.start_soon(parts.fleet.run)
            await parts.jobs.start(tasks)
            if parts.mqtt is not None:
                tasks.start_soon(parts.mqtt.run)
            if parts.reader.issuers is not None:
                parts.reader.issuers.start(tasks)
            started.set_result(None)
            await self._stop.wait()
            tasks.cancel_scope.cancel()

    async def _announce_ready(self) -> None:
        await self._listening.wait()
        told_at = -math.inf
        while not self.parts.can_answer():  # engines, policy and cloud have no common event
            if (now := self.parts.clock.monotonic()) >= told_at + _STARTING_S:
                told_at = now
                self.notifier.starting(f"waiting for {', '.join(self.parts.readiness().waiting_for)}")
            await asyncio.sleep(_READY_POLL_S)
        if self.parts.admission.draining:
            return
        report = self.parts.policies.report
        self.notifier.ready(f"policy {report.name}@{report.revision}")
        log.info("Ready: a target can answer.")
        self._ready.set()

    async def _call_when_ready(self, on_ready: Callable[[App], None]) -> None:
        await self._ready.wait()
        on_ready(self)

    async def _reload(self) -> None:
        await self._reload_requested.wait()
        self._reload_requested.clear()
        await self.parts.policies.reload()

    async def _ping_watchdog(self) -> None:
        """Ping the watchdog only after a trial routing decision succeeds."""
        self.parts.service.self_check()
        self.notifier.watchdog()


def _addresses(settings: Config, tcp: ConnectionTable, unix: ConnectionTable) -> list[Address]:
    """Return the addresses that the daemon is configured to listen on. Raises ConfigError for unusable certificates."""
    addresses, config = [], settings.server
    if config.host:
        needs_key = settings.needs_key or bool(config.tls.client_ca_file)
        hosts = listener_hosts(config.host, config.hosts, needs_key=needs_key)
        tls = server_tls(config.tls, "server.tls")
        origins = WebOrigins(config.origins, hosts, "server.origins")
        addresses.append(Address(tcp, origins, "server.port", config.host, config.port, tls=tls))
    if config.socket:
        origins = WebOrigins(config.origins, key="server.origins")
        addresses.append(Address(unix, origins, "server.socket", socket=config.socket))
    return addresses


def _first_cause(error: BaseException) -> BaseException:
    """Return the first exception that is not a group, which names the task that failed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _every(seconds: float, work: Callable[[], Awaitable[object] | None]) -> None:
    """Repeat `work` forever, first after `seconds`. A failure is logged and the next run follows as usual."""
    while True:
        await asyncio.sleep(seconds)
        try:
            if (unfinished := work()) is not None:
                await unfinished
        except Exception as error:
            log.error("A recurring task failed: %s", redacted(error))


async def _cancel_after(event: asyncio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


class SystemdNotifier:
    """Reports the daemon's state to the socket `NOTIFY_SOCKET`, if it is set: one datagram per message (sd_notify(3)),
    dropped if it cannot be sent. A small library does the same, but reads the process's environment itself, drops text
    that is not Latin-1, and blocks the caller when systemd is slow. `watchdog_s`: seconds between two `watchdog` calls,
    half of systemd's limit; None when its watchdog is off.
    """

    def __init__(self, environ: Mapping[str, str], *, pid: int | None = None) -> None:
        self._address = _socket_name(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog_s(environ, os.getpid() if pid is None else pid)

    def ready(self, status: str = "") -> bool:
        return self._send("READY=1", status)

    def starting(self, status: str) -> bool:
        """Ask systemd for another minute to start. Call it again within that time while the start continues."""
        return self._send(f"EXTEND_TIMEOUT_USEC={_EXTENSION_S * 1_000_000}", status)

    def watchdog(self) -> bool:
        """Ping the watchdog. Call it only after a trial routing decision succeeded."""
        return self._send("WATCHDOG=1", "")

    def reloading(self, status: str = "") -> bool:
        """Report that the daemon restarts in the same process; `ready` follows."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}", status)

    def stopping(self, status: str = "") -> bool:
        return self._send("STOPPING=1", status)

    def _send(self, state: str, status: str) -> bool:
        if not self._address:
            return False
        line = "STATUS=" + " ".join(status.split()) if status else ""  # a newline would begin another variable
        message = "\n".join(part for part in (state, line) if part).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message, self._address)
        except OSError:
            return False
        return True


def _socket_name(name: str) -> str:
    """Return the address of a socket name: a path, or an abstract name for ``@``; others (vsock) are not supported."""
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # meant for another process
    try:
        seconds = int(environ.get("WATCHDOG_USEC", "")) / 2e6
    except ValueError:
        return None
    return seconds if seconds > 0 else None
