"""The jobs API over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits
from causeway_server.cloud_pool.core.principal import Principal
from causeway_server.cloud_pool.jobs.http.job_api import JobApi, JobCallers, begin_response
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.outboxes import WebhookOutbox
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import AuthenticationFailed, ClientGone
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.upstream.decode import Event, SSEParser
from causeway_server.router.types import RoutingHints

from .conftest import Clock
from .gateway import identify, serving
from .scripted_worker import RunningWorker, ScriptedRunner

TIER = Tier(TierConfig(name="large", max_sequences=4), ChatFormat("{{ messages }}"))
SMALL = Tier(TierConfig(name="small"), ChatFormat("{{ messages }}"))
CHAT = {"model": "big", "messages": [{"role": "user", "content": "a secret question"}]}


@pytest_asyncio.fixture
async def http(config: JobsConfig, stores: JobStores) -> AsyncIterator[aiohttp.ClientSession]:
    config = msgspec.structs.replace(config, max_body_bytes=5000, max_event_streams=1)

    def limits(asker: Principal) -> TenantLimits:
        return TenantLimits(max_tokens=50, max_body_bytes=300) if asker.tenant == "capped" else TenantLimits()

    tiers = {"large": TIER, "big": TIER, "small": SMALL}
    api = JobApi(config, stores, SubmissionParser(config, tiers), JobCallers(identify, limits=limits))
    async with serving(api.handler) as url:
        headers = {"authorization": "Bearer kiosk"}
        async with aiohttp.ClientSession(url, headers=headers) as session:
            yield session


async def submit(http: aiohttp.ClientSession, body: object = CHAT, **headers: str) -> tuple[int, dict[str, object]]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post("/v1/jobs", json=body, headers=sent) as response:
        return response.status, await response.json()


async def test_a_job_is_accepted_run_and_read(http: aiohttp.ClientSession, store: JobStore, config: JobsConfig) -> None:
    """The tier's alias is resolved, and the result is OpenAI's chat completion."""
    status, job = await submit(http, CHAT | {"priority": "bulk", "deadline_ms": 5000})
    assert (status, job["status"], job["priority"], job["model"]) == (202, "queued", "bulk", "large")
    assert int(str(job["deadline_at"])) - int(str(job["created_at"])) == 5
    assert job["result"] is None
    async with RunningWorker(store, ScriptedRunner(), config):
        events = await follow(http, str(job["id"]))
    assert [event.type for event in events] == [b"queued", b"running", b"delta", b"succeeded"]
    async with http.get(f"/v1/jobs/{job['id']}") as response:
        ended = await response.json()
    assert ended["status"] == "succeeded"
    assert ended["result"]["choices"][0]["message"]["content"] == "an answer"


async def test_a_job_for_more_sequences_than_its_tier_takes_is_refused(http: aiohttp.ClientSession) -> None:
    status, refused = await submit(http, CHAT | {"n": 5})
    assert status == 400
    assert "5 sequences" in str(refused["error"])
    assert "the tier 'large' takes at most 4" in str(refused["error"])


@pytest.mark.parametrize(
    ("field", "meant"), [("webhok", "webhook"), ("priorty", "priority"), ("dedline_ms", "deadline_ms")]
)
async def test_a_misspelt_field_of_a_job_is_refused(http: aiohttp.ClientSession, field: str, meant: str) -> None:
    status, refused = await submit(http, CHAT | {field: "x"})
    assert status == 400
    assert f"`{field}` is not a known field, did you mean `{meant}`?" in str(refused["error"])


async def follow(http: aiohttp.ClientSession, job: str, last: str = "") -> list[Event]:
    headers = {"last-event-id": last} if last else {}
    async with http.get(f"/v1/jobs/{job}/events", headers=headers) as response:
        assert response.status == 200, await response.text()
        return SSEParser().feed(await response.read())


async def test_a_full_redis_ends_no_event_stream(
    http: aiohttp.ClientSession, store: JobStore, config: JobsConfig, database: RedisClient
) -> None:
    """Running jobs end in it, and their clients learn of it; the text comes with the end."""
    _, job = await submit(http)
    await database.command("CONFIG", "SET", "maxmemory", "1")
    try:
        async with RunningWorker(store, ScriptedRunner(), config):
            events = await follow(http, str(job["id"]))
    finally:
        await database.command("CONFIG", "SET", "maxmemory", "0")
    assert [event.type for event in events] == [b"queued", b"running", b"delta", b"succeeded"]


async def test_events_end_when_the_token_is_revoked(config: JobsConfig, stores: JobStores) -> None:
    """Those of a client that follows a job, which may last for days; the error says why."""
    revoked: set[str] = set()

    def accepted(request: web.BaseRequest) -> Principal:
        principal = identify(request)
        if principal.tenant in revoked:
            raise AuthenticationFailed("the token has been revoked")
        return principal

    api = JobApi(config, stores, SubmissionParser(config, {"large": TIER, "big": TIER}), JobCallers(accepted))
    headers = {"authorization": "Bearer kiosk"}
    async with serving(api.handler) as url, aiohttp.ClientSession(url, headers=headers) as http:
        _, job = await submit(http)
        async with http.get(f"/v1/jobs/{job['id']}/events") as response:
            reader = SSEParser()
            events: list[Event] = []
            while not events:
                events += reader.feed(await response.content.readany())
            revoked.add("kiosk")
            events += reader.feed(await response.read())
    assert [event.type for event in events[:-1]] == [b"queued"]
    assert b"the token has been revoked" in events[-1].data
    assert b"invalid_api_key" in events[-1].data


async def test_events_continue_after_last_event_id(
    http: aiohttp.ClientSession, store: JobStore, config: JobsConfig
) -> None:
    """After the final event the stream ends at once."""
    _, job = await submit(http)
    async with RunningWorker(store, ScriptedRunner(), config):
        events = await follow(http, str(job["id"]))
    rest = await follow(http, str(job["id"]), events[0].id.decode())
    assert rest == events[1:]
    assert await follow(http, str(job["id"]), events[-1].id.decode()) == []
    async with http.get(f"/v1/jobs/{job['id']}/events", headers={"last-event-id": "x"}) as response:
        assert response.status == 400


async def test_event_streams_are_limited_and_released(http: aiohttp.ClientSession, store: JobStore) -> None:
    _, job = await submit(http)
    path = f"/v1/jobs/{job['id']}/events"
    async with http.get(path) as first:
        await first.content.readany()
        async with http.get(path) as second:
            assert second.status == 429
    for _ in range(2000):  # until the server notices that the first client has left
        async with http.get(path) as third:
            if third.status == 200:
                break
        await asyncio.sleep(0)
    assert third.status == 200


async def test_an_idempotency_key_gives_one_job(http: aiohttp.ClientSession) -> None:
    """Another body is 409; another owner gets a job of its own."""
    _, first = await submit(http, idempotency_key="k-1")
    status, again = await submit(http, idempotency_key="k-1")
    assert (status, again["id"]) == (202, first["id"])
    other_order = json.dumps(dict(reversed(CHAT.items())), indent=1).replace("secret", "\\u0073ecret").encode()
    for body in (other_order, b"\xef\xbb\xbf" + other_order):
        sent = {"idempotency-key": "k-1", "content-type": "application/json"}
        async with http.post("/v1/jobs", data=body, headers=sent) as response:
            assert (response.status, (await response.json())["id"]) == (202, first["id"])
    status, fault = await submit(http, CHAT | {"priority": "bulk"}, idempotency_key="k-1")
    assert (status, fault["error"]["code"]) == (409, "idempotency_conflict")  # type: ignore[index]
    _, other = await submit(http, idempotency_key="k-1", authorization="Bearer another")
    assert other["id"] != first["id"]


async def test_concurrent_requests_with_one_key_give_one_job(http: aiohttp.ClientSession, store: JobStore) -> None:
    answers = await asyncio.gather(*(submit(http, idempotency_key="k") for _ in range(20)))
    assert len({str(job["id"]) for _, job in answers}) == 1
    assert len(await store.list_owned("kiosk/1", limit=50)) == 1


async def test_another_owners_job_is_404(http: aiohttp.ClientSession) -> None:
    _, job = await submit(http)
    thief = {"authorization": "Bearer thief"}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        async with http.request(method, f"/v1/jobs/{job['id']}{path}", headers=thief) as response:
            assert response.status == 404
            mine = await response.json()
        async with http.request(method, f"/v1/jobs/{job['id'][:-1]}x{path}", headers=thief) as response:  # type: ignore[index]
            none = await response.json()
        assert mine["error"]["code"] == none["error"]["code"] == "not_found"
    async with http.get("/v1/jobs", headers=thief) as response:
        assert (await response.json())["data"] == []


async def test_a_caller_without_a_token_gets_401(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/jobs", headers={"authorization": ""}) as response:
        assert response.status == 401


async def test_a_token_without_the_scope_is_403(http: aiohttp.ClientSession) -> None:
    status, _ = await submit(http, authorization="Bearer kiosk:chat")
    assert status == 403


async def test_a_tenants_limits_apply_to_jobs(http: aiohttp.ClientSession) -> None:
    status, fault = await submit(http, CHAT | {"max_tokens": 51}, authorization="Bearer capped")
    assert (status, fault["error"]["param"]) == (400, "max_tokens")  # type: ignore[index]
    status, _ = await submit(http, CHAT | {"user": "x" * 300}, authorization="Bearer capped")
    assert status == 413
    status, _ = await submit(http, CHAT | {"max_tokens": 50}, authorization="Bearer capped")
    assert status == 202


async def test_cancel_is_idempotent_and_409_after_the_end(http: aiohttp.ClientSession) -> None:
    _, job = await submit(http)
    for _ in range(2):
        async with http.delete(f"/v1/jobs/{job['id']}") as response:
            assert (response.status, (await response.json())["status"]) == (200, "cancelled")


async def test_a_job_is_cancelled_by_its_key_and_by_its_owner_alone(http: aiohttp.ClientSession) -> None:
    _, job = await submit(http, idempotency_key="mine")
    cancelled = [
        ({}, 400, "invalid_value"),
        ({"idempotency-key": "another"}, 404, "not_found"),
        ({"idempotency-key": "mine", "authorization": "Bearer somebody"}, 404, "not_found"),
        ({"idempotency-key": "mine", "authorization": "Bearer kiosk:chat"}, 403, "permission_denied"),
    ]
    for headers, status, code in cancelled:
        async with http.delete("/v1/jobs", headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)
    for _ in range(2):
        async with http.delete("/v1/jobs", headers={"idempotency-key": "mine"}) as response:
            found = await response.json()
            assert (response.status, found["id"], found["status"]) == (200, job["id"], "cancelled")


async def test_jobs_are_listed_in_pages_newest_first(http: aiohttp.ClientSession, clock: Clock) -> None:
    names = []
    for _ in range(3):
        clock.now += 1
        names.append((await submit(http))[1]["id"])
    async with http.get("/v1/jobs", params={"limit": "2"}) as response:
        first = await response.json()
    assert ([row["id"] for row in first["data"]], first["has_more"]) == ([names[2], names[1]], True)
    async with http.get("/v1/jobs", params={"after": first["last_id"]}) as response:
        second = await response.json()
    assert ([row["id"] for row in second["data"]], second["has_more"]) == ([names[0]], False)
    async with http.get("/v1/jobs", params={"limit": "0"}) as response:
        assert response.status == 400


@pytest.mark.parametrize(
    ("changes", "headers", "status", "param"),
    [
        ({"model": "nowhere"}, {}, 404, "model"),
        ({"messages": []}, {}, 400, "messages"),
        ({"priority": "urgent"}, {}, 400, "priority"),
        ({"deadline_ms": 0}, {}, 400, "deadline_ms"),
        ({"deadline_ms": "soon"}, {}, 400, "deadline_ms"),
        ({"not_before_ms": -1}, {}, 400, "not_before_ms"),
        ({"not_before_ms": 5000, "deadline_ms": 5000}, {}, 400, "not_before_ms"),
        ({"not_before_ms": 10**18}, {}, 400, "not_before_ms"),
        ({"webhook": "http://example.com"}, {}, 400, "webhook"),
        ({"webhook": "https://127.0.0.1/"}, {}, 400, "webhook"),
        ({"endpoint": "/v1/images/generations"}, {}, 400, "endpoint"),
        ({}, {"idempotency_key": "k" * 256}, 400, None),
        ({}, {"x_causeway_deadline_ms": "0"}, 400, "x-causeway-deadline-ms"),
        ({}, {"x_causeway_priority": "urgent"}, 400, "x-causeway-priority"),
        ({"user": "x" * 6000}, {}, 413, None),
    ],
)
async def test_an_invalid_submission_names_the_parameter(
    http: aiohttp.ClientSession,
    store: JobStore,
    changes: dict[str, object],
    headers: dict[str, str],
    status: int,
    param: str,
) -> None:
    found, fault = await submit(http, CHAT | changes, **headers)
    assert (found, fault["error"]["param"]) == (status, param)  # type: ignore[index]
    assert await store.list_owned("kiosk/1") == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nonsense", b'{"a":' * 2000, b'{"model":"big","model":"big","priority":"bulk"}']
)
async def test_a_malformed_body_is_400(http: aiohttp.ClientSession, body: bytes) -> None:
    """Also deep nesting and duplicate keys."""
    async with http.post("/v1/jobs", data=body, headers={"content-type": "application/json"}) as response:
        assert response.status in (400, 413)


async def test_head_changes_no_job_and_waits_for_no_event(http: aiohttp.ClientSession) -> None:
    _, job = await submit(http)
    paths = {f"/v1/jobs/{job['id']}": "application/json", f"/v1/jobs/{job['id']}/events": "text/event-stream"}
    for path, kind in paths.items():
        for _ in range(2):  # a connection that is in order takes the next request, and the stream's share is free again
            async with http.head(path) as head:
                assert (head.status, head.content_type, await head.read()) == (200, kind, b"")
    async with http.get(f"/v1/jobs/{job['id']}") as response:
        assert (await response.json())["status"] == "queued"


async def test_unknown_methods_are_405_and_unknown_paths_404(http: aiohttp.ClientSession) -> None:
    async with http.put("/v1/jobs") as response:
        assert response.status == 405
        assert "POST" in (await response.json())["error"]["message"]
    async with http.get("/v1/jobsx") as response:
        assert response.status == 404


async def test_a_disabled_webhook_is_refused(
    http: aiohttp.ClientSession, config: JobsConfig, database: RedisClient, store: JobStore, clock: Clock
) -> None:
    hooks = WebhookOutbox(database, config.webhooks)
    body = CHAT | {"webhook": "https://hooks.example.com/"}
    _, job = await submit(http, body)
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.succeed(str(job["id"]), record.fence, b"{}")
    (hook,) = await hooks.claim(1)
    await hooks.finish(hook, "disabled")
    status, fault = await submit(http, body)
    assert (status, fault["error"]["code"]) == (400, "webhook_disabled")  # type: ignore[index]


async def test_webhook_secrets_rotate_and_differ_by_owner(http: aiohttp.ClientSession) -> None:
    async def secret_of(method: str, token: str = "kiosk") -> dict[str, str]:
        headers = {"authorization": f"Bearer {token}"}
        async with http.request(method, "/v1/webhooks/secret", headers=headers) as response:
            return await response.json()

    first = await secret_of("GET")
    assert await secret_of("GET") == first
    assert json.dumps(await secret_of("GET", "another")).find(first["secret"]) < 0
    second = await secret_of("POST")
    assert second["previous"] == first["secret"] != second["secret"]


async def test_a_jobs_priority_is_bounded_by_its_token(http: aiohttp.ClientSession) -> None:
    """In its body and in the header."""
    for token, priority in (("kiosk", "interactive"), ("limited", "standard"), ("modest", "bulk")):
        by_body = await submit(http, CHAT | {"priority": "interactive"}, authorization=f"Bearer {token}")
        by_header = await submit(http, CHAT, authorization=f"Bearer {token}", x_causeway_priority="interactive")
        assert [(status, job["priority"]) for status, job in (by_body, by_header)] == [(202, priority)] * 2


async def test_a_job_with_a_part_that_no_tier_takes_is_refused_at_once(http: aiohttp.ClientSession) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, body = await submit(http, CHAT | {"messages": [{"role": "user", "content": [image]}]})
    assert (status, body["error"]["code"], body["error"]["param"]) == (  # type: ignore[index]
        400, "unsupported_feature", "messages[0].content[0]",
    )  # fmt: skip


def test_a_job_may_have_parts_that_a_tier_reads_and_they_are_no_tokens() -> None:
    images = Tier(TierConfig(name="images", can=("image",)), ChatFormat(""))
    parser = SubmissionParser(JobsConfig(), {"big": TIER, "images": images})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}
    body = msgspec.json.encode(CHAT | {"max_tokens": 5, "messages": [{"role": "user", "content": [image]}]})
    request = parse_chat(body, RoutingHints())
    parser.check_parts(request)
    assert parser.tokens(request, body) < 100


async def test_a_job_uses_the_models_and_content_of_its_token_only(http: aiohttp.ClientSession) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seeing = [{"role": "user", "content": [image]}]
    for changes, status, code in (
        ({}, 202, ""),
        ({"model": "small"}, 403, "model_not_found"),
        ({"messages": seeing}, 403, "permission_denied"),
    ):
        found, body = await submit(http, CHAT | changes, authorization="Bearer limited")
        assert found == status, body
        assert status == 202 or body["error"]["code"] == code  # type: ignore[index]


class Left(web.StreamResponse):
    """A response to a client that has left."""

    async def prepare(self, request: web.BaseRequest) -> None:
        raise ConnectionResetError


async def test_client_that_leaves_before_its_response_is_no_fault_of_the_gateway() -> None:
    with pytest.raises(ClientGone):
        await begin_response(Left(), make_mocked_request("GET", "/"))
