"""The composition root of the gateway: the only place that builds its parts and wires them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from router.errors import ConfigError

from .admission import Admission
from .config import Config
from .listener import Listener
from .metrics import Metrics
from .readiness import Readiness
from .server import Server
from .service import Service
from .tiers import by_name, load_tiers
from .tokens import Tokens, load_tokens
from .triton import Triton

_log = logging.getLogger("causeway.cloud")


class App:
    """A gateway that runs: `start`, then `drain` and `close`."""

    def __init__(self, config: Config, server: Server, tritons: dict[str, Triton], tasks: TaskGroup) -> None:
        self._config = config
        self._server = server
        self._tritons = tritons
        self._tasks = tasks
        self._listener = Listener(config.server, server.handle)

    @property
    def url(self) -> str:
        host = self._config.server.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._listener.port}/v1"

    async def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        for triton in self._tritons.values():
            self._tasks.start_soon(triton.watch)
        await self._listener.start()

    async def drain(self) -> None:
        """No new work; what runs may end within `drain_s`."""
        self._server.draining = True
        await self._listener.drain(self._config.server.drain_s)

    async def close(self) -> None:
        """Ends the background work too: nothing may use a server that is closed."""
        await self._listener.close()
        self._tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for triton in self._tritons.values():
                await triton.close()


def build(config: Config, tasks: TaskGroup) -> App:
    """Everything checked and wired, nothing started. `tasks` is the parent of background work. Raises ConfigError."""
    tokens = load_tokens(Path(config.server.token_file)) if config.server.token_file else Tokens()
    tiers = load_tiers(config)
    metrics = Metrics()
    addresses = dict.fromkeys(tier.config.triton for tier in tiers)
    tritons = {address: Triton(address, tasks, repaired=metrics.repaired) for address in addresses}
    admissions = {tier.name: Admission(tier.config.concurrency, tier.config.queue) for tier in tiers}
    for name, admission in admissions.items():
        metrics.watch(name, admission)
    service = Service(tritons, admissions)
    readiness = Readiness(tiers, tritons, config.server.probe_ttl_s)
    server = Server(config.server, by_name(tiers), service, readiness, tokens, metrics)
    return App(config, server, tritons, tasks)


async def run(config: Config, stop: asyncio.Event) -> None:
    """Until `stop`; then drained and closed. Prints one line when requests are taken. Raises ConfigError."""
    faults = []
    async with anyio.create_task_group() as tasks:
        try:
            await _serve(build(config, tasks), stop)
        except ConfigError as error:
            faults.append(error)  # Raised below: out of a task group it would come wrapped.
        tasks.cancel_scope.cancel()
    for fault in faults:
        raise fault


async def _serve(app: App, stop: asyncio.Event) -> None:
    await app.start()
    print(f"ready url={app.url}", flush=True)
    await stop.wait()
    _log.info("draining")
    await app.drain()
    await app.close()
