"""A device whose policy keeps requests in a region: what each of its clouds gets, with faults and cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.config.schema import CloudServer, MqttConfig, OutboxConfig, OutboxWebhookConfig
from causeway_server.router.config import TracingConfig
from causeway_server.router.errors import OutsideRegion
from causeway_server.router.types import Message, Request, Target
from tests.e2e.sessions.peer import Peer, done
from tests.e2e.tracing.collector import Collector
from tests.waiting import until

from ..device import POLICY, Answer, Device, running
from ..jobs.cloud import JobCloud
from ..jobs.support import PROMPT, accepted, ended, request, submit
from ..scripted import FAULTS, Fault

BOUND = POLICY.replace(
    "constraints:\n", "constraints:\n  - {name: home, keep: in_region, regions: [eu], when: '\"eu\" in request.tags'}\n"
).replace("at: cloud\n", "at: [cloud:us, cloud:eu, cloud:none]\n")
HASTY = BOUND.replace("first_token_timeout: 20s\n    timeout: 25s", "first_token_timeout: 300ms\n    timeout: 500ms")
HOOKS = OutboxWebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
SECRET = "the-secret-question"


class Regions:
    """The device, and its clouds: `us` and `eu` in the regions of their names, `none` in none."""

    def __init__(self, device: Device, clouds: dict[str, JobCloud]) -> None:
        self.device = device
        self.clouds = clouds

    @property
    def asked(self) -> dict[str, int]:
        return {name: len(cloud.bodies) + cloud.submissions for name, cloud in self.clouds.items()}

    async def ask(self, tags: str = "cloud,eu", **body: Any) -> Answer:
        return await self.device.ask(SECRET, tags=tags, **body)

    def assert_only_eu(self, times: int) -> None:
        assert self.asked == {"us": 0, "eu": times, "none": 0}


@asynccontextmanager
async def three_regions(
    folder: Path,
    policy: str = BOUND,
    jobs: OutboxConfig | None = None,
    tracing: TracingConfig | None = None,
    mqtt: MqttConfig | None = None,
) -> AsyncIterator[Regions]:
    clouds = {name: JobCloud() for name in ("us", "eu", "none")}
    for cloud in clouds.values():
        await cloud.start()
    listed = {name: CloudServer(url=one.url, region=name.replace("none", "")) for name, one in clouds.items()}
    try:
        async with running(folder, policy=policy, clouds=listed, jobs=jobs, tracing=tracing, mqtt=mqtt) as device:
            yield Regions(device, clouds)
    finally:
        for cloud in clouds.values():
            await cloud.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bound_request_reaches_only_its_region_and_the_record_names_it(tmp_path: Path, stream: bool) -> None:
    """The cloud is told the regions as a tag, which a gateway obeys, too."""
    async with three_regions(tmp_path) as bed:
        answer = await bed.ask(stream=stream)
        assert (answer.status, answer.headers["x-causeway-target"]) == (200, "large")
        bed.assert_only_eu(1)
        assert bed.clouds["eu"].request_headers[0]["x-causeway-tags"] == "in-region:eu"
        record = await bed.device.record(answer)
        assert record.decision is not None
        assert record.decision.regions == ("eu",)
        assert [(one.cloud, one.region) for one in record.outcome.attempts] == [("eu", "eu")]
        assert record.snapshot.setup is not None
        assert record.snapshot.setup.regions == {"us": "us", "eu": "eu"}


async def test_an_unbound_request_goes_where_the_policy_says(tmp_path: Path) -> None:
    async with three_regions(tmp_path) as bed:
        assert (await bed.ask("cloud")).status == 200
        assert bed.asked == {"us": 1, "eu": 0, "none": 0}
        assert "x-causeway-tags" not in bed.clouds["us"].request_headers[0]
        assert bed.device.newest().outcome.attempts[0].region == "us"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_in_the_region_leads_to_the_device_never_to_another_region(tmp_path: Path, fault: Fault) -> None:
    async with three_regions(tmp_path, HASTY) as bed:
        bed.clouds["eu"].fault = fault
        answer = await bed.ask(stream=True)
        assert answer.status == 200
        assert bed.asked["eu"]
        assert bed.asked["us"] == bed.asked["none"] == 0
        bed.device.assert_nothing_leaks()


async def test_with_the_region_cut_and_no_device_model_it_is_503(tmp_path: Path) -> None:
    async with three_regions(tmp_path, BOUND.replace("use: [large, small]", "use: [large]")) as bed:
        await bed.clouds["eu"].stop()
        answer = await bed.ask()
        assert (answer.status, answer.code) == (503, "all_attempts_failed")
        assert bed.asked == {"us": 0, "eu": 0, "none": 0}


async def test_a_client_that_leaves_takes_the_work_along(tmp_path: Path) -> None:
    async with three_regions(tmp_path) as bed:
        bed.clouds["eu"].gate = asyncio.Event()
        asking = asyncio.ensure_future(bed.ask(stream=True))
        await bed.clouds["eu"].entered.wait()
        asking.cancel()
        await until(lambda: bed.clouds["eu"].running == 0)
        bed.assert_only_eu(1)
        bed.device.assert_nothing_leaks()


async def test_bindings_that_exclude_each_other_leave_nothing_and_say_so(tmp_path: Path) -> None:
    """Also for a request that names the target."""
    async with three_regions(tmp_path) as bed:
        answer = await bed.ask("cloud,eu,in-region:us", model="large")
        assert (answer.status, answer.code) == (503, "outside_region")
        assert "region_excluded: it is in us" in answer.message
        assert bed.asked == {"us": 0, "eu": 0, "none": 0}


async def test_the_clouds_refuse_a_bound_request_whatever_was_decided(tmp_path: Path) -> None:
    async with three_regions(tmp_path) as bed:
        question = Request(kind="chat", model="m", messages=(Message("user", SECRET),))
        call = BackendRequest("1", question, Target("large", "cloud", "m", cloud="us"), 1e9, regions=frozenset({"eu"}))
        clouds = bed.device.parts.clouds
        for ask in (clouds.generate, clouds.complete):
            with pytest.raises(OutsideRegion, match=r"bound to eu, but clouds\.us is in us"):
                ask(call)
        with pytest.raises(OutsideRegion):
            await clouds.embed(call)
        assert bed.asked == {"us": 0, "eu": 0, "none": 0}


async def test_requests_of_other_regions_share_no_cached_answer(tmp_path: Path) -> None:
    async with three_regions(tmp_path) as bed:
        for tags in ("cloud", "cloud,eu", "cloud,eu", "cloud"):
            assert (await bed.ask(tags, temperature=0.0)).status == 200
        assert bed.asked == {"us": 1, "eu": 1, "none": 0}


async def test_a_live_session_keeps_the_regions_of_its_items(tmp_path: Path) -> None:
    """The items of a bound response bind those that follow."""
    async with three_regions(tmp_path) as bed:
        peer = await Peer.connect(bed.device.app.port, "model=auto", headers={"x-causeway-tags": "cloud"})
        await peer.event()
        for restriction in ({}, {"causeway": {"tags": ["eu"]}}, {}):
            assert done(await peer.ask(SECRET, **restriction))["status"] == "completed"
        peer.cut()
        assert bed.asked == {"us": 1, "eu": 2, "none": 0}


@pytest.mark.parametrize("kind", ["chain", "conversation", "background"])
async def test_what_continues_a_bound_response_stays_in_its_region(tmp_path: Path, kind: str) -> None:
    """Also if nothing else of the request is bound, and the cloud that comes first is another."""
    async with three_regions(tmp_path, jobs=PROMPT) as bed:

        async def respond(text: str, tags: str, **state: object) -> dict[str, Any]:
            headers = {"x-causeway-tags": tags}
            body = {"model": "auto", "input": text, "store": True, **state}
            answer = await request(bed.device, "POST", "/v1/responses", body, headers)
            assert answer.status == 200, answer.body
            return answer.json

        more: dict[str, object] = {"background": True} if kind == "background" else {}
        if kind == "conversation":
            more = {"conversation": (await request(bed.device, "POST", "/v1/conversations", {})).json["id"]}
        first = await respond(SECRET, "cloud,eu", **more)
        if kind == "background":
            await until(lambda: bed.asked["eu"] == 1)
            path = f"/v1/responses/{first['id']}"
            while (await request(bed.device, "GET", path)).json["status"] != "completed":
                pass
        for text in ("and now", "and then"):
            state = more if kind == "conversation" else {"previous_response_id": first["id"]}
            first = await respond(text, "cloud", **state)
        bed.assert_only_eu(3)
        await respond("another question", "cloud")
        assert bed.asked == {"us": 1, "eu": 3, "none": 0}


@pytest.mark.slow
async def test_a_job_keeps_its_region_and_is_cancelled_only_there(tmp_path: Path) -> None:
    """Also where the policy no longer binds it."""
    async with three_regions(tmp_path, jobs=PROMPT) as bed:
        job = await accepted(bed.device, SECRET, tags="cloud,eu")
        assert (await ended(bed.device, job))["status"] == "succeeded"
        bed.assert_only_eu(1)
        bed.clouds["eu"].waits = True
        waiting = await accepted(bed.device, "another", tags="cloud,eu")
        await until(lambda: bed.clouds["eu"].submissions == 2)
        await request(bed.device, "DELETE", f"/v1/jobs/{waiting}")
        await until(lambda: bool(bed.clouds["eu"].cancelled))
        assert bed.clouds["us"].cancelled == bed.clouds["none"].cancelled == []
        bed.assert_only_eu(2)


@pytest.mark.slow
async def test_a_job_of_before_stays_bound_under_a_policy_that_binds_none(tmp_path: Path) -> None:
    async with three_regions(tmp_path, jobs=PROMPT) as bed:
        await bed.clouds["eu"].stop()
        job = await accepted(bed.device, SECRET, tags="cloud,eu")
    unbound = POLICY.replace("at: cloud\n", "at: [cloud:us, cloud:eu]\n")
    async with three_regions(tmp_path, unbound, jobs=PROMPT) as bed:
        assert (await ended(bed.device, job))["status"] == "succeeded"
        bed.assert_only_eu(1)


@pytest.mark.parametrize(
    ("regions", "status"), [({"127.0.0.1": "EU"}, 202), ({"127.0.0.1": "us"}, 503), ({}, 503)], ids=repr
)
async def test_a_bound_job_has_a_webhook_only_in_its_region(
    tmp_path: Path, regions: dict[str, str], status: int
) -> None:
    jobs = msgspec.structs.replace(PROMPT, webhooks=msgspec.structs.replace(HOOKS, regions=regions))
    async with three_regions(tmp_path, jobs=jobs) as bed:
        answer = await submit(bed.device, SECRET, tags="cloud,eu", webhook="http://127.0.0.1:9/hook")
        assert answer.status == status
        assert status == 202 or answer.code == "outside_region"
        assert (await submit(bed.device, tags="edge", webhook="http://127.0.0.1:9/hook")).status == 202


@pytest.mark.parametrize(("region", "traced"), [("eu", 3), ("us", 1), ("", 1)])
async def test_a_bound_request_is_traced_only_to_a_collector_in_its_region(
    tmp_path: Path, region: str, traced: int
) -> None:
    """Of a request that a cloud answers, of one that the cache answers, and of an unbound one."""
    collector = await Collector().start()
    async with three_regions(tmp_path, tracing=TracingConfig(endpoint=collector.url, region=region)) as bed:
        for tags in ("cloud,eu", "cloud,eu", "cloud"):
            assert (await bed.ask(tags, temperature=0.0)).status == 200
        await until(lambda: bed.device.app.in_flight == 0)
        assert bed.device.parts.tracing is not None
        await asyncio.to_thread(bed.device.parts.tracing.close)
    await collector.stop()
    assert sum(span.name == "chat auto" for span in collector.spans) == traced
