"""The composition root: everything is made and wired here, and nowhere else.

    app = build(config)
    await app.start()      # listens; engines still load in the background
    await app.drain()      # nobody new; those inside finish, for at most `server.drain_s`
    await app.close()      # nothing is left: no task, no child, no socket file

or `await app.serve()`, which does the three and ends with SIGTERM or SIGINT (a second one does not wait).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import anyio.abc

from router.policy import Policy
from router.types import Place

from .admission import Admission, AdmissionLimits
from .api import Api
from .attempts import Attempts, Patience, where
from .backend import Backend
from .cache import AnswerCache
from .clock import Clock, system_clock
from .cloud import CloudBackend
from .config import Config, EngineConfig
from .decisions import DecisionStore
from .engines import Engine, Engines
from .flight import Flights
from .intake import Intake
from .metrics import Metrics
from .notify import Notifier
from .policies import DEFAULT_POLICY, PolicyStore
from .probes import Probes
from .readings import Parts, readings
from .server import Server
from .service import Service
from .signals import Signals

log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_POLL_S = 2.0
_SAVE_S = 5.0
_YOUNG = 10_000  # allocations between two looks at the youngest objects: about every fiftieth request


class App:
    """The daemon's parts, and their life. Made by `build`."""

    def __init__(self, config: Config, parts: Parts, api: Api, notifier: Notifier) -> None:
        self._config = config
        self._parts = parts
        self._notifier = notifier
        self._server = Server(config.server, api.handle)
        self._stop = asyncio.Event()
        self._hung_up = asyncio.Event()  # SIGHUP came
        self._root: asyncio.Task[None] | None = None

    @property
    def port(self) -> int | None:
        """The TCP port that is listened on; None before the start, or without one."""
        return self._server.port

    @property
    def parts(self) -> Parts:
        return self._parts

    async def start(self) -> None:
        """Raises ConfigError (an address, the policy, a certificate) with everything put away again."""
        parts = self._parts
        _raise_file_limit()
        parts.policies.load()
        parts.signals.sample()
        parts.cache.start()
        parts.decisions.start()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._root = asyncio.create_task(self._live(started), name="causeway-edge")  # the parent of every other task
        try:
            if parts.cloud is not None:
                await parts.cloud.start()
            await started
            await self._server.start()
        except BaseException:
            await self.close()
            raise
        self._notifier.ready(f"policy {parts.policies.report.name}@{parts.policies.report.revision}")
        log.info(
            "listening on port %s%s", self.port, f" and {self._config.server.socket}" * bool(self._config.server.socket)
        )

    async def drain(self) -> bool:
        """False: the time was up before everybody was done."""
        self._notifier.stopping("draining")
        self._parts.admission.drain()
        self._server.stop_accepting()
        return await self._server.drain(self._config.server.drain_s)

    async def close(self) -> None:
        parts = self._parts
        await self._server.close()
        self._stop.set()
        if self._root is not None:
            await asyncio.wait([self._root])
        for backend in (parts.engines, parts.cloud):
            if backend is not None:
                await backend.close()
        await asyncio.to_thread(self._put_away)

    def _put_away(self) -> None:
        self._parts.cache.close()
        self._parts.decisions.close()
        self._parts.signals.save()

    async def serve(self, *, on_ready: Callable[[App], None] = lambda _: None) -> None:
        """Start, answer until SIGTERM or SIGINT, drain, close. SIGHUP reads the policy again."""
        loop = asyncio.get_running_loop()
        asked, hurried = asyncio.Event(), asyncio.Event()

        def stop() -> None:
            (hurried if asked.is_set() else asked).set()

        await self.start()
        try:
            loop.add_signal_handler(signal.SIGTERM, stop)
            loop.add_signal_handler(signal.SIGINT, stop)
            loop.add_signal_handler(signal.SIGHUP, self._hung_up.set)
            _settle_memory()
            on_ready(self)
            await asked.wait()
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(_cancel_after, hurried, leaving.cancel_scope)
                if not await self.drain():
                    log.warning("some requests were still running after %g s", self._config.server.drain_s)
                leaving.cancel_scope.cancel()
        finally:
            await self.close()

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _live(self, started: asyncio.Future[None]) -> None:
        """The root of all tasks: flights, engines, and what is done every so often."""
        parts = self._parts
        async with anyio.create_task_group() as tasks:
            parts.flights.run(tasks)
            if parts.engines is not None:
                parts.engines.run(tasks)
            if parts.cloud is not None:
                tasks.start_soon(_every, 0.0, parts.cloud.watch)
            tasks.start_soon(_every, _SAMPLE_S, _sync(parts.signals.sample))
            tasks.start_soon(_every, _POLL_S, parts.policies.poll)
            tasks.start_soon(_every, 0.0, self._reload)
            tasks.start_soon(_every, _SAVE_S, lambda: asyncio.to_thread(parts.signals.save))
            if self._notifier.watchdog_s is not None:
                tasks.start_soon(_every, self._notifier.watchdog_s, self._tell_watchdog)
            started.set_result(None)
            await self._stop.wait()
            tasks.cancel_scope.cancel()

    async def _reload(self) -> None:
        await self._hung_up.wait()
        self._hung_up.clear()
        await self._parts.policies.reload()

    async def _tell_watchdog(self) -> None:
        """Alive is who routes: a loop that still turns around a broken policy is not."""
        self._parts.service.rehearse()
        self._notifier.watchdog()


def build(
    config: Config,
    *,
    make_engine: Callable[[str], Engine] | None = None,
    clock: Clock | None = None,
    environ: Mapping[str, str] = os.environ,
) -> App:
    """Everything of one daemon, not started. `make_engine` gives the engine for an edge target's model."""
    clock = clock or system_clock()
    state_dir = Path(config.state_dir) if config.state_dir else None
    engines = Engines(make_engine or _engine_maker(config.engine)) if config.engine.enabled else None
    cloud = CloudBackend(config.cloud) if config.cloud.url else None
    signals = Signals(clock, edge=engines, cloud=cloud, read_device=Probes().read, state_dir=state_dir)
    admission = Admission(AdmissionLimits())
    metrics = Metrics(lambda: readings(parts))

    def activate(policy: Policy) -> None:
        limits = policy.limits
        admission.set_limits(AdmissionLimits(limits.concurrent, limits.queue, limits.per_client_rps))
        metrics.set_targets(target.name for target in policy.targets)
        if engines is not None:
            engines.use(policy)

    policies = PolicyStore(
        Path(config.policy) if config.policy else DEFAULT_POLICY,
        state_dir=state_dir,
        clock=clock,
        on_activate=activate,
        on_load=metrics.policy_loaded,
    )
    cache = AnswerCache(
        memory_bytes=config.cache.memory_bytes,
        disk_bytes=config.cache.disk_bytes,
        directory=state_dir,
        clock=clock,
    )
    decisions = DecisionStore(
        memory_count=config.decisions.memory_count,
        max_age_s=config.decisions.max_age_s,
        directory=state_dir,
        clock=clock,
    )
    flights = Flights()
    service = Service(
        policies=policies,
        admission=admission,
        cache=cache,
        flights=flights,
        attempts=Attempts(_backends(engines, cloud), {"cloud": _cloud_patience(config)}),
        signals=signals,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        count=None if engines is None else engines.count,
        deadline_s=config.server.default_deadline_s,
    )
    parts = Parts(
        started=clock.monotonic(),
        clock=clock,
        policies=policies,
        admission=admission,
        cache=cache,
        decisions=decisions,
        flights=flights,
        signals=signals,
        metrics=metrics,
        service=service,
        engines=engines,
        cloud=cloud,
    )
    api = Api(
        service=service,
        intake=Intake(config.server),
        policies=policies,
        decisions=decisions,
        metrics=metrics,
        clock=clock,
        readiness=parts.readiness,
    )
    return App(config, parts, api, Notifier(environ))


def _backends(engines: Engines | None, cloud: CloudBackend | None) -> dict[Place, Backend]:
    backends: dict[Place, Backend] = {}
    if engines is not None:
        backends["edge"] = engines
    if cloud is not None:
        backends["cloud"] = cloud
    return backends


def _cloud_patience(config: Config) -> Patience:
    return Patience(first_token_s=config.cloud.first_token_timeout_s, whole_s=config.cloud.timeout_s)


def _engine_maker(config: EngineConfig) -> Callable[[str], Engine]:
    """Engines from artifacts: the folders of the configuration first, then the models that ship."""

    def make(model: str) -> Engine:
        # Not before an engine is wanted: a box without one need not have the parts that it is made of.
        from models.spec import find_artifact

        from .engine import EngineBackend

        artifact = find_artifact(model, [Path(folder) for folder in config.model_dirs])
        refuse_token = artifact.manifest.refuse_token or ""
        return EngineBackend(artifact.path, config, refuse_token=refuse_token, name=artifact.name)

    return make


async def _every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """For ever, first after `seconds`. What goes wrong once is logged, and tried again."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception as error:
            log.error("a recurring task failed: %s", where(error))


def _sync(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        work()

    return run


async def _cancel_after(event: asyncio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _settle_memory() -> None:
    """What is there after the start stays: the collector need not look at it again, nor so often at young records."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)


def _raise_file_limit() -> None:
    """Connections are files: take what the system allows us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
