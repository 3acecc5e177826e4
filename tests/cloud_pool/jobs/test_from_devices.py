"""A device's jobs at the gateway's own jobs API, on a real Redis: one effect, however often the device restarts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from causeway_server.cloud_pool.jobs.http.job_api import JobApi, JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from tests.edge_node.device import running
from tests.edge_node.jobs.support import PROMPT, accepted, ended, request, text_of
from tests.edge_node.scripted import ScriptedCloud

from .conftest import until
from .gateway import identify, serving
from .scripted_worker import RunningWorker, ScriptedRunner

pytestmark = [pytest.mark.redis, pytest.mark.slow]


class Gateway(ScriptedCloud):
    """Runs already."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url + "/v1"


async def test_a_job_that_a_device_cancels_is_cancelled_at_the_gateway(
    config: JobsConfig, stores: JobStores, tmp_path: Path
) -> None:
    """Also while the gateway was away: nothing runs, and the request is deleted."""
    tiers = {"m-large": Tier(TierConfig(name="large"), ChatFormat("{{ messages }}"))}
    api = JobApi(config, stores, SubmissionParser(config, tiers), JobCallers(identify))
    runner = ScriptedRunner()

    async def states() -> list[str]:
        return [job.state.value for job in await stores.jobs.list_owned("kiosk/1", after="", limit=2)]

    async def is_in(state: str) -> bool:
        return await states() == [state]

    async with serving(api.handler) as url:
        start = partial(running, tmp_path, cloud=Gateway(url), jobs=PROMPT, api_key="kiosk", probe_interval_s=0.02)
        async with start() as device:
            job = await accepted(device, tags="cloud", priority="bulk", deadline_ms=3_600_000)
            await until(partial(is_in, "queued"))
            assert (await request(device, "DELETE", f"/v1/jobs/{job}")).json["status"] == "cancelled"
            await until(partial(is_in, "cancelled"))
        async with RunningWorker(stores.jobs, runner, config):
            assert (await stores.jobs.claim("w", "large", ["bulk"])).records == ()
    assert runner.runs == []


async def test_a_job_of_a_device_is_done_once(config: JobsConfig, stores: JobStores, tmp_path: Path) -> None:
    """The device is restarted while its job waits at the gateway, and finds the same job there."""
    tiers = {  # by the name that the device's policy has for it
        "m-large": Tier(TierConfig(name="large"), ChatFormat("{{ messages }}"))
    }
    api = JobApi(config, stores, SubmissionParser(config, tiers), JobCallers(identify))
    runner = ScriptedRunner()

    async def is_queued() -> bool:
        return bool(await stores.jobs.list_owned("kiosk/1", after="", limit=2))

    async with serving(api.handler) as url:
        start = partial(running, tmp_path, cloud=Gateway(url), jobs=PROMPT, api_key="kiosk", probe_interval_s=0.02)
        async with start() as device:
            job = await accepted(device, tags="cloud", priority="bulk", deadline_ms=3_600_000)
            await until(is_queued)
        async with start() as device, RunningWorker(stores.jobs, runner, config):
            found = await ended(device, job)
    assert (found["status"], found["route"], text_of(found)) == ("succeeded", "cloud", "an answer")
    assert len(runner.runs) == 1
    assert len(await stores.jobs.list_owned("kiosk/1", after="", limit=2)) == 1
