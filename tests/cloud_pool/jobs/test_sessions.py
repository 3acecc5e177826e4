"""Jobs, lines of batches and responses in the background are turns of their sessions at a gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import pytest

from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.degradation.config import TierSessionsConfig
from causeway_server.cloud_pool.degradation.tier_sessions import TierSessions
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import SessionTargetUnavailable
from causeway_server.router.session_tags import session_tag
from causeway_server.router.types import RoutingHints
from tests.bed.agents import KINDS, Agent, Kind
from tests.cloud_pool.degradation.test_sessions import CHAIN, HEAD, Bed, agent, bed, chat
from tests.own_task import in_own_task
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.slow]
_prefixes = itertools.count()


def jobs_at(server: RedisServer) -> JobsConfig:
    return JobsConfig(
        redis=server.url,
        region="eu",
        durability="warn",
        key_prefix=f"{{sessions{next(_prefixes)}}}",
        reclaim_interval_s=0.05,
        backoff_s=0.01,
        max_attempts=2,
        drain_s=0.0,
    )


@asynccontextmanager
async def at_work(made: Bed) -> AsyncIterator[None]:
    """A worker beside the gateway."""
    stop = asyncio.Event()
    worker = asyncio.ensure_future(run_worker(made.gateways[0].app.config, stop))
    try:
        yield
    finally:
        stop.set()
        await worker


@asynccontextmanager
async def working(folder: Path, server: RedisServer, mode: str = "require") -> AsyncIterator[Bed]:
    """Yield a gateway with the tiers large and medium, and a worker beside it."""
    async with in_own_task(bed(folder, mode, url=server.url, jobs=jobs_at(server))) as made, at_work(made):
        yield made


async def get(made: Bed, path: str, ended: tuple[str, ...]) -> Any:
    """Return what is at the path once its status is one of `ended`."""
    (gateway,) = made.gateways
    async with asyncio.timeout(60):
        while True:
            async with gateway.session.get(gateway.app.url + path) as reply:
                found = await reply.json()
            if found["status"] in ended:
                return found
            await asyncio.sleep(0.02)


async def in_job(made: Bed, one: Agent, words: str = "tools=0", *, model: str = "large") -> str:
    """One turn as a job, or as a response in the background. Return the model that answered, or the error's code."""
    one.say(words)
    headers: dict[str, str] = {}
    path, body = one.request(headers, stream=False)
    body |= {"model": model}
    (gateway,) = made.gateways
    if one.kind == "chain":
        answer = await gateway.post("/responses", {**body, "background": True}, headers)
    else:
        answer = await gateway.post("/jobs", {**body, "endpoint": path}, headers)
    if answer.status >= 300:
        one.history.pop()
        return str(answer.code)
    name = answer.json["id"]
    if one.kind == "chain":
        found = result = await get(made, f"/responses/{name}", ("completed", "failed"))
    else:
        found = await get(made, f"/jobs/{name}", ("succeeded", "failed"))
        result = found["result"]
    assert not found["error"], found
    one.take(json.dumps(result).encode(), stream=False)
    return str(found["model"])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_in_a_job_goes_to_the_tier_that_asked(
    tmp_path: Path, redis_server: RedisServer, kind: Kind
) -> None:
    """Which was a fallback; and the result of a tool that a job asked for goes to the job's tier."""
    async with working(tmp_path, redis_server) as made:
        one = agent(kind)
        made.clouds["large"].status = 503
        assert (await made.turn(one, "tools=2"))[0] == "medium"
        made.clouds["large"].status = 200
        assert await in_job(made, one) == "medium"
        assert (await made.turn(one))[::2] == ("medium", "stayed; reason=session")
        assert await in_job(made, one, "tools=1", model="medium") == "medium"
        assert (await made.turn(one))[::2] == ("medium", "stayed; reason=session")
        assert made.scripts.foreign == []


@pytest.mark.parametrize(("mode", "outcome"), [("require", "session_target_unavailable"), ("prefer", "medium")])
async def test_a_job_for_a_tier_that_may_not_answer_the_session(
    tmp_path: Path, redis_server: RedisServer, mode: str, outcome: str
) -> None:
    """It names `medium`, which does not fall back to `large`."""
    async with working(tmp_path, redis_server, mode) as made:
        one = agent()
        assert (await made.turn(one, "tools=1"))[0] == "large"
        assert await in_job(made, one, model="medium") == outcome


async def test_an_accepted_job_stays_at_its_tier_although_its_session_moved(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """The session was new when the job came. Before it ran, another turn was answered by a tier that is not its own."""
    jobs, named = jobs_at(redis_server), {"x-session-id": "one"}
    async with in_own_task(bed(tmp_path, url=redis_server.url, pin="conversation", jobs=jobs)) as made:
        (gateway,) = made.gateways
        asked: dict[str, object] = {"messages": [{"role": "user", "content": "tools=0"}]}
        accepted = await gateway.post("/jobs", {**asked, "model": "medium"}, named)
        turn = await gateway.post("/chat/completions", {**asked, "model": "large"}, named)
        assert turn.headers["x-causeway-tier"] == "large"
        async with at_work(made):
            job = await get(made, f"/jobs/{accepted.json['id']}", ("succeeded", "failed"))
        assert (job["status"], job["model"], job["error"]) == ("succeeded", "medium", None)


@pytest.mark.parametrize("mode", ["require", "prefer"])
async def test_a_line_is_not_pinned_to_a_tier_that_its_token_may_not_use(mode: Literal["require", "prefer"]) -> None:
    """Another token of its client, which may use both tiers, made the turn before."""
    tiers = {name: Tier(TierConfig(name=name), ChatFormat("")) for name in CHAIN}
    sessions = TierSessions(TierSessionsConfig(mode=mode, pin="conversation"), {"large": CHAIN}, None)
    request = msgspec.structs.replace(chat(1), hints=RoutingHints(client="acme/kiosk", tags=(session_tag("one"),)))
    turn = await sessions.find(request, "acme", "acme/kiosk", "large")
    assert turn is not None
    await sessions.keep(turn, HEAD, request)  # `medium` answered
    parser = SubmissionParser(JobsConfig(), tiers, sessions=sessions)
    assert (await parser.placed(request, "acme", None)).model == "medium"
    placing = parser.placed(request, "acme", frozenset({"large"}))
    if mode == "prefer":
        assert (await placing).model == "large"
        return
    with pytest.raises(SessionTargetUnavailable, match="This request may not use that tier"):
        await placing


async def test_a_job_is_bound_by_its_session_and_binds_it(tmp_path: Path, redis_server: RedisServer) -> None:
    """Also if it is refused."""
    async with working(tmp_path, redis_server) as made:
        (gateway,) = made.gateways
        us = {"x-causeway-tags": "in-region:us"}

        def chat(words: str) -> dict[str, object]:
            return {"model": "large", "messages": [{"role": "user", "content": f"{words} tools=0"}]}

        for first, second in (("/chat/completions", "/jobs"), ("/jobs", "/chat/completions")):
            named = {"x-session-id": first}
            assert (await gateway.post(first, chat(first), {**named, **us})).code == "outside_region"
            assert (await gateway.post(second, chat("other words"), named)).code == "outside_region"
            assert (await gateway.post(second, chat(first), {})).code == "outside_region"
            assert (await gateway.post(second, chat("free words"), {})).status < 300


async def test_lines_of_a_batch_stay_in_their_sessions(tmp_path: Path, redis_server: RedisServer) -> None:
    """The line of a session that is bound to another region is refused."""
    async with working(tmp_path, redis_server) as made:
        (gateway,), one = made.gateways, agent()
        made.clouds["large"].status = 503
        assert (await made.turn(one, "tools=1"))[0] == "medium"
        made.clouds["large"].status = 200
        one.say("")
        _, result = one.request({}, stream=False)
        bound: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": "bound tools=0"}]}
        us = {"x-causeway-tags": "in-region:us"}
        assert (await gateway.post("/chat/completions", bound, us)).code == "outside_region"
        bodies = {"result": {**result, "model": "large"}, "bound": bound}
        url = "/v1/chat/completions"
        lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies.items()]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="in.jsonl")
        async with gateway.session.post(f"{gateway.app.url}/files", data=form) as reply:
            file = (await reply.json())["id"]
        ask: dict[str, object] = {"input_file_id": file, "endpoint": url, "completion_window": "24h"}
        batch = await get(made, f"/batches/{(await gateway.post('/batches', ask)).json['id']}", ("completed", "failed"))
        outcomes: dict[str, Any] = {}
        for kind in ("output_file_id", "error_file_id"):
            async with gateway.session.get(f"{gateway.app.url}/files/{batch[kind]}/content") as reply:
                rows = [json.loads(row) for row in (await reply.text()).splitlines()]
            outcomes |= {row["custom_id"]: row for row in rows}
        assert outcomes["result"]["response"]["body"]["model"] == "medium"
        assert outcomes["bound"]["error"]["code"] == "outside_region"
        assert made.scripts.foreign == []
