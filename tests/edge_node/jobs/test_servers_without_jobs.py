"""When the cloud counts as a server without jobs: a moment's 404 never costs a job its exactly-once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from causeway_server.edge_node.backends.backend import JobTerms
from causeway_server.edge_node.backends.cloud.backend import CloudBackend
from causeway_server.router.errors import CloudSaturated
from tests.edge_node.backends.test_cloud import CLOUD, AheadClock, answer_of, call, connected

from .cloud import JobCloud


class FlakyCloud(JobCloud):
    """`refusal`: the status answered to submissions; 0: they are taken."""

    refusal = 0

    async def _create(self, request: web.Request) -> web.Response:
        if self.refusal:
            return web.Response(status=self.refusal, text="<html>no such page</html>")
        return await super()._create(request)

    @property
    def plain(self) -> int:
        """Requests that were not sent as jobs."""
        return len(self.bodies)


@pytest.fixture
async def cloud() -> AsyncIterator[FlakyCloud]:
    cloud = FlakyCloud()
    await cloud.start()
    yield cloud
    await cloud.stop()


async def pinned(_: str) -> bool:
    return True


async def job_answer(backend: CloudBackend, key: str, ahead_s: float = 0.0) -> str:
    one = call(time_s=60.0 + ahead_s, first_s=60.0 + ahead_s)
    async with asyncio.timeout(60.0):
        return await answer_of(backend, msgspec.structs.replace(one, job=JobTerms(key, "standard", pinned)))


@pytest.mark.parametrize("status", [403, 404, 405, 501])
@pytest.mark.parametrize("earlier", [False, True], ids=["first job", "had jobs"])
async def test_one_refusal_is_waited_for(cloud: FlakyCloud, status: int, earlier: bool) -> None:
    async with connected(cloud.url) as backend:
        if earlier:
            assert await job_answer(backend, "earlier") == CLOUD
        cloud.refusal = status
        with pytest.raises(CloudSaturated, match=f"HTTP {status} to /jobs"):
            await job_answer(backend, "one")
        cloud.refusal = 0
        assert await job_answer(backend, "one") == CLOUD
        assert backend.signals().breaker == "closed"
        assert backend.signals().unavailable_models == ()
    assert cloud.plain == 0
    assert cloud.keys[-1] == "one"


@pytest.mark.parametrize(("earlier", "sure_s"), [(False, 5.0), (True, 600.0)], ids=["never had jobs", "had jobs"])
async def test_a_server_that_goes_on_refusing_has_no_jobs(cloud: FlakyCloud, earlier: bool, sure_s: float) -> None:
    clock = AheadClock()
    async with connected(cloud.url, now=clock) as backend:
        if earlier:
            await job_answer(backend, "earlier")
        cloud.refusal = 404
        for clock.ahead_s in (0.0, sure_s / 2.0, sure_s - 1.0):
            with pytest.raises(CloudSaturated):
                await job_answer(backend, "one", clock.ahead_s)
        clock.ahead_s = sure_s + 1.0
        assert await job_answer(backend, "one", clock.ahead_s) == CLOUD
        assert cloud.plain == 1
        cloud.refusal = 0  # it is asked for jobs again after ten minutes
        clock.ahead_s += 601.0
        assert await job_answer(backend, "two", clock.ahead_s) == CLOUD
    assert cloud.plain == 1


async def test_refusals_with_jobs_between_them_do_not_add_up(cloud: FlakyCloud) -> None:
    clock = AheadClock()
    async with connected(cloud.url, now=clock) as backend:
        for clock.ahead_s in (0.0, 400.0, 800.0, 1200.0):
            cloud.refusal = 404
            with pytest.raises(CloudSaturated):
                await job_answer(backend, f"key-{clock.ahead_s}", clock.ahead_s)
            cloud.refusal = 0
            await job_answer(backend, f"key-{clock.ahead_s}", clock.ahead_s)
    assert cloud.plain == 0
