"""The handlers of /v1/jobs, and of the secrets of webhooks.

The other modules of jobs are imported with the first job, unless their file exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio.abc

from causeway_server.router.errors import JobStoreUnavailable, NotFound
from causeway_server.router.jobs.job import wait_of
from causeway_server.router.jobs.submission import ENDPOINTS
from causeway_server.router.serving.request import AiohttpRequest
from causeway_server.router.serving.responses import Handler, ServerResponse

from ..storage.sealed import exists
from . import FILE, PATH

if TYPE_CHECKING:
    from causeway_server.router.serving.webhooks import WebhookSender

    from .api import JobIntake, OutboxApi
    from .record import OutboxStats, OutboxWebhook
    from .runner import OutboxRunner
    from .store import JobOutbox
    from .webhooks import CloudCanceller, ReceiverQueue

SECRET_PATH = "/v1/webhooks/secret"


class JobParts(NamedTuple):
    """The parts of the room `jobs`, which exist from the first job on."""

    store: JobOutbox
    runner: OutboxRunner
    intake: JobIntake
    api: OutboxApi
    webhooks: ReceiverQueue
    sender: WebhookSender[OutboxWebhook]
    canceller: CloudCanceller


class LazyJobs:
    """The daemon's access to jobs. `make` constructs the parts in the state `folder`; None: jobs are refused."""

    def __init__(self, folder: Path | None, make: Callable[[Path], JobParts]) -> None:
        self._folder = folder
        self._make = make
        self._tasks: anyio.abc.TaskGroup | None = None
        self._parts: JobParts | None = None
        self._opened = False

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {
            PATH: ("GET, POST", self._collection),
            f"{PATH}/{{id}}": ("GET, DELETE", self._job),
            f"{PATH}/{{id}}/events": ("GET", self._job),
            f"{PATH}/{{id}}/retry": ("POST", self._job),
            f"{PATH}/{{id}}/purge": ("POST", self._job),
            SECRET_PATH: ("GET, POST", self._secret),
        }

    async def as_job(self, http: AiohttpRequest) -> ServerResponse | None:
        """Run a request with `Prefer: respond-async` as a job; return None if it asks for none, or cannot be one.
        Raises CausewayError if the request is invalid, or the job's own error.
        """
        wait_s = wait_of(http.headers.getall("Prefer", ()))
        endpoint = next((one for one in ENDPOINTS if one == http.path), None)
        if wait_s is None or endpoint is None:
            return None
        try:
            api = (await self.open()).api
        except JobStoreUnavailable:
            return None  # a preference may be ignored
        return await api.respond_async(http, endpoint, wait_s)

    @property
    def stats(self) -> OutboxStats | None:
        """Return the counts of the outbox; None before the first job."""
        return None if self._parts is None else self._parts.store.stats

    @property
    def unreachable(self) -> int:
        """Return the number of attempts to send webhooks that found no connection."""
        return 0 if self._parts is None else self._parts.webhooks.unreachable

    @property
    def problems(self) -> tuple[str, ...]:
        return () if self._parts is None else self._parts.store.problems

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Run jobs as children of `tasks`, from now on if there are any."""
        self._tasks = tasks
        if self._exists:
            with contextlib.suppress(JobStoreUnavailable):  # `problems` reports it; the next request tries again
                await self.open()

    def close(self) -> None:
        """Commit waiting work. Blocking; the tasks have ended before."""
        if self._parts is not None:
            self._parts.store.close()

    async def erase(self, owner: str) -> tuple[int, int]:
        """Erase all jobs of a client; return their number, and that of its secrets. Raises JobStoreUnavailable."""
        if not self._exists:
            return 0, 0
        parts = await self.open()
        jobs, secrets = await parts.store.erase(owner)
        for job in jobs:
            parts.runner.stop_job(job)
        return len(jobs), secrets

    @property
    def _exists(self) -> bool:
        return self._folder is not None and exists(self._folder / FILE)

    async def _collection(self, http: AiohttpRequest) -> ServerResponse:
        api = (await self.open()).api
        return await (api.create(http) if http.method == "POST" else api.list(http))

    async def _secret(self, http: AiohttpRequest) -> ServerResponse:
        return await (await self.open()).api.secret(http)

    async def _job(self, http: AiohttpRequest) -> ServerResponse:
        if not self._exists:
            raise NotFound("There are no jobs on this device.")
        api = (await self.open()).api
        job_id, _, part = http.path.removeprefix(PATH + "/").partition("/")
        if part == "events":
            return await api.events(http, job_id)
        return await (api.change(http, job_id, part) if part or http.method == "DELETE" else api.get(http, job_id))

    async def open(self) -> JobParts:
        """Open the file, unless it is open. Raises JobStoreUnavailable."""
        if self._parts is None:
            if self._folder is None or self._tasks is None:
                raise JobStoreUnavailable("Jobs require a state folder. Set state_dir.")
            self._parts = self._make(self._folder)
            self._parts.store.start()
            self._tasks.start_soon(self._parts.runner.run)
            self._tasks.start_soon(self._parts.sender.run)
            self._tasks.start_soon(self._parts.canceller.run)
        if not self._opened:
            await self._parts.store.open()
            self._opened = True
        return self._parts
