"""The daemon's life: start, the tasks that go on beside requests, drain, end; and what is the process's own business.

One task is the root of all others (flights, engines, what is done every so often): when it ends, they have ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import Awaitable, Callable

import anyio

from ..config.schema import Config
from ..http.api import Api
from ..http.listener import HttpListener
from ..serving.attempts import where
from .components import Components
from .systemd import SystemdNotifier

log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_POLL_S = 2.0
_SAVE_S = 5.0
_YOUNG = 10_000  # allocations between two looks at the youngest objects: about every fiftieth request


class App:
    """The daemon's parts, and their life. Made by `build`."""

    def __init__(self, config: Config, parts: Components, api: Api, notifier: SystemdNotifier) -> None:
        self._config = config
        self._parts = parts
        self._notifier = notifier
        self._server = HttpListener(config.server, api.handle)
        self._stop = asyncio.Event()
        self._hung_up = asyncio.Event()  # SIGHUP came
        self._root: asyncio.Task[None] | None = None

    @property
    def port(self) -> int | None:
        """The TCP port that is listened on; None before the start, or without one."""
        return self._server.port

    @property
    def parts(self) -> Components:
        return self._parts

    async def start(self) -> None:
        """Raises ConfigError (an address, the policy, a certificate) with everything put away again."""
        parts = self._parts
        _raise_file_limit()
        parts.policies.load()
        parts.signals.sample_device()
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
        self._parts.signals.save_spend()
        if self._parts.tracing is not None:
            self._parts.tracing.close()

    async def serve(self, *, on_ready: Callable[[App], None] = lambda _: None) -> None:
        """Start, answer until SIGTERM or SIGINT, drain, close. SIGHUP reads the policy again.

        A SIGINT while it drains means now. A further SIGTERM means nothing new: the kernel sends one for each thread of
        a parent that dies (prctl(2), PR_SET_PDEATHSIG).
        """
        loop = asyncio.get_running_loop()
        asked, hurried = asyncio.Event(), asyncio.Event()

        def interrupt() -> None:
            (hurried if asked.is_set() else asked).set()

        await self.start()
        try:
            loop.add_signal_handler(signal.SIGTERM, asked.set)
            loop.add_signal_handler(signal.SIGINT, interrupt)
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
            tasks.start_soon(_every, _SAMPLE_S, _sync(parts.signals.sample_device))
            tasks.start_soon(_every, _POLL_S, parts.policies.poll)
            tasks.start_soon(_every, 0.0, self._reload)
            tasks.start_soon(_every, _SAVE_S, lambda: asyncio.to_thread(parts.signals.save_spend))
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
        self._parts.service.self_check()
        self._notifier.watchdog()


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
