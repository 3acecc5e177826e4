"""A chat or Message that a cloud answers whole, in callbacks: answer, record and error are as from the general path."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.backends.backend import BackendRequest, UpstreamInfo
from causeway_server.edge_node.backends.cloud.backend import CloudBackend
from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.http.api import HeadFacts
from causeway_server.edge_node.serving.direct import Arrival, DirectAnswer, DirectAnswers
from causeway_server.router.anthropic.replies import MESSAGES
from causeway_server.router.errors import AuthenticationFailed
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.serving.request import HttpExchange, PlainRequest
from causeway_server.router.serving.upstream.direct import DirectConnection
from causeway_server.router.types import DecisionRecord
from tests.waiting import until

from ..device import POLICY, Answer, Device, hasty, running
from ..scripted import CLOUD_WORDS, EDGE_WORDS, Fault, ScriptedCloud, whole_answer

CLOUD, EDGE = "".join(CLOUD_WORDS), "".join(EDGE_WORDS)
LISTED = "/v1/chat/completions"
# What differs between any two requests.
_OWN = ("x-request-id", "request-id", "x-causeway-decision", "date")
_TIMES = ("started_ms", "ttft_ms", "duration_ms", "total_ms", "cache_age_s", "id", "created", "snapshot")


class Watched(DirectAnswers):
    """Keeps what was begun."""

    is_off = False  # every request takes the general path
    begun: list[DirectAnswer]
    connection: DirectConnection  # the last one

    @classmethod
    def of(cls, device: Device) -> Watched:
        watched = cls(device.parts.service, device.parts.clouds)
        watched.begun = []
        device.app.api.direct = watched
        return watched

    def begin(self, arrival: Arrival, http: PlainRequest, connection: DirectConnection) -> DirectAnswer | None:
        answer = None if self.is_off else super().begin(arrival, http, connection)
        if answer is not None:
            self.begun.append(answer)
            self.connection = connection
        return answer


@asynccontextmanager
async def client(device: Device) -> AsyncIterator[Device]:
    """Yield the device as a client on a new connection sees it."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{device.app.port}") as session:
        yield Device(device.app, device.engine, device.cloud, session)


async def chat(device: Device, *, tags: str = "cloud", headers: Mapping[str, str] = {}, **body: Any) -> Answer:
    """Ask for an answer that is not cached."""
    given: dict[str, Any] = {"temperature": 0.7, **body}
    return await device.ask(tags=tags, headers=headers, **given)


async def twins(device: Device, headers: Mapping[str, str] = {}, **body: Any) -> tuple[Answer, Answer]:
    """Return the answers to the same request on the general path, and in callbacks, with a warm connection each."""
    cloud, watched = device.cloud, Watched.of(device)
    fault, status, cloud.fault, cloud.status = cloud.fault, cloud.status, "none", 200
    async with client(device) as one, client(device) as other:
        await chat(other, headers=headers, **body)
        cloud.fault, cloud.status = fault, status
        watched.is_off = True
        general = await chat(one, headers=headers, **body)
        watched.is_off = False
        cloud.fault, cloud.status = "none", 200
        await chat(device, tags="cloud")  # leaves an idle connection to the cloud
        cloud.fault, cloud.status = fault, status
        before = len(watched.begun)
        direct = await chat(other, headers=headers, **body)
        assert len(watched.begun) == before + 1, "it was not direct"
        return general, direct


def stripped(value: object) -> object:
    """Return a record without ids and times."""
    if isinstance(value, dict):
        return {name: stripped(one) for name, one in value.items() if name not in _TIMES}
    return [stripped(one) for one in value] if isinstance(value, list | tuple) else value


async def assert_alike(device: Device, general: Answer, direct: Answer) -> DecisionRecord:
    """Check that two answers and their records differ in ids and times alone. Returns the record of the second."""
    assert direct.status == general.status
    assert list(direct.headers) == list(general.headers)
    own = [
        {name: value for name, value in one.headers.items() if name.lower() not in _OWN} for one in (general, direct)
    ]
    assert own[0] == own[1]
    bodies: list[dict[str, Any]] = [{**one.json, "id": "", "created": 0} for one in (general, direct)]
    assert bodies[0] == bodies[1]
    records = [await device.record(one) for one in (general, direct)]
    plain = [stripped(msgspec.to_builtins(one)) for one in records]
    assert plain[0] == plain[1]
    times = records[1].outcome
    assert times.total_ms > 0.0
    for attempt in times.attempts:
        assert attempt.duration_ms is not None
        assert attempt.started_ms + attempt.duration_ms <= times.total_ms + 2.0  # the loop's clock is coarse
    return records[1]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {}),
        ({}, {"model": "large", "max_tokens": 5, "user": "one"}),
        ({}, {"messages": [{"role": "user", "content": "größer \U0001f600"}], "top_p": 0.5, "stop": ["x"]}),
        ({"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}, {}),
        ({"x-causeway-deadline-ms": "5000"}, {}),
        ({"Accept-Encoding": "gzip"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
    ids=["plain", "named", "sampling", "trace", "deadline", "tools"],
)
async def test_an_answer_and_its_record_are_those_of_the_general_path(
    device: Device, headers: dict[str, str], body: dict[str, Any]
) -> None:
    general, direct = await twins(device, headers, **body)
    record = await assert_alike(device, general, direct)
    assert direct.text == CLOUD
    assert record.outcome.usd > 0.0
    sent = device.cloud.bodies
    assert sent[-1] == sent[1]
    own = ("x-causeway-deadline-ms", "x-request-id", "content-length")
    lines = [{name: one for name, one in each.items() if name not in own} for each in device.cloud.request_headers]
    assert lines[-1] == lines[1]
    device.assert_nothing_leaks()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_leaves_nothing_for_the_garbage_collector(device: Device, stream: bool) -> None:
    """The bodies of each request would stay in memory until the next collection."""
    watched = Watched.of(device)
    async with client(device) as warm:
        await chat(device)
        await chat(warm)
        gc.collect()
        gc.disable()
        try:
            watched.begun.clear()
            await chat(warm, stream=stream)
            assert watched.begun
            await until(lambda: [sys.getrefcount(one) for one in watched.begun] == [3])
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {}),
        ({"anthropic-version": "2023-06-01"}, {"system": "be brief", "top_k": 4, "stop_sequences": ["x"]}),
        ({}, {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ],
    ids=["plain", "sampling", "thinking"],
)
async def test_a_message_and_its_record_are_those_of_the_general_path(
    device: Device, headers: dict[str, str], body: dict[str, Any]
) -> None:
    general, direct = await twins(device, headers, path=MESSAGES, max_tokens=5, **body)
    record = await assert_alike(device, general, direct)
    assert direct.json["content"] == [{"type": "text", "text": CLOUD}]
    assert direct.headers["request-id"] == record.id == direct.json["id"].removeprefix("msg_")
    device.assert_nothing_leaks()


async def test_a_message_of_an_unknown_version_is_refused(device: Device) -> None:
    await chat(device)  # leaves an idle connection to the cloud
    watched = Watched.of(device)
    for headers, status in (({}, 200), ({"anthropic-version": "2001-01-01"}, 400)):
        assert (await chat(device, headers=headers, path=MESSAGES, max_tokens=5)).status == status
    assert len(watched.begun) == 1


async def test_a_page_of_another_origin_may_read_the_answer(tmp_path: Path) -> None:
    page = "https://page.example"
    async with running(tmp_path, server=ServerConfig(port=0, origins=(page,))) as device:
        general, direct = await twins(device, {"Origin": page})
        await assert_alike(device, general, direct)
        assert direct.headers["Access-Control-Allow-Origin"] == page


async def test_metrics_and_spending_count_it_once(device: Device) -> None:
    _, direct = await twins(device)
    record = await device.record(direct)
    counts = {(one.route, one.status): one.count for one in device.parts.metrics.request_counts()}
    assert counts == {("cloud", "ok"): 4}
    lines = device.parts.metrics.text().decode().splitlines()
    assert 'causeway_edge_attempts_total{error="",state="done",target="large"} 4.0' in lines
    assert 'causeway_edge_tokens_total{target="large",type="input"} 28.0' in lines
    assert 'causeway_edge_request_seconds_count{route="cloud"} 4.0' in lines
    # All four under the same labels, whichever way they took.
    for name in ("server_request_duration", "server_time_to_first_token", "server_time_per_output_token"):
        assert [line[-3:] for line in lines if line.startswith(f"gen_ai_{name}_count")] == ["4.0"]
    usage = [line[-3:] for line in lines if line.startswith("gen_ai_client_token_usage_count")]
    assert usage == ["4.0", "4.0"]
    assert device.parts.spend.current.usd_today == pytest.approx(4 * record.outcome.usd)


async def test_a_gateways_headers_are_passed_on(device: Device) -> None:
    """A degraded answer of a gateway takes the general path, whose record has the gateway's reason."""
    passed = {*UpstreamInfo.__struct_fields__} - {"tier", "reason", "degraded"}
    device.cloud.headers = {"x-causeway-tier": "big", **{f"x-causeway-{name}": f"its-{name}" for name in passed}}
    general, direct = await twins(device)
    await assert_alike(device, general, direct)
    for name in passed:
        assert direct.headers[f"x-causeway-{name}"] == f"its-{name}"
    device.cloud.headers |= {"x-causeway-degraded": "true", "x-causeway-tier-reason": "saturated"}
    general, direct = await twins(device)
    record = await assert_alike(device, general, direct)
    assert record.outcome.attempts[0].detail == "answered by tier big: saturated"


async def test_a_compressed_answer_is_read(device: Device) -> None:
    class Compressing(ScriptedCloud):
        async def _whole(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            data = gzip.compress(json.dumps(whole_answer(CLOUD)).encode())
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            return aiohttp.web.Response(body=data, headers=headers)

    device.cloud.__class__ = Compressing
    general, direct = await twins(device)
    assert direct.text == CLOUD
    await assert_alike(device, general, direct)


async def test_a_large_answer_is_read_to_its_end(device: Device) -> None:
    """Its bytes arrive in parts, and more than a connection buffers."""
    text = "word " * 200_000

    class Talkative(ScriptedCloud):
        async def _whole(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            return aiohttp.web.json_response(whole_answer(text))

    device.cloud.__class__ = Talkative
    general, direct = await twins(device)
    assert direct.text == text
    await assert_alike(device, general, direct)


@pytest.mark.parametrize("fault", ["refuse", "corrupt", "die", "unfinished"])
async def test_after_a_fault_the_next_target_answers(device: Device, fault: Fault) -> None:
    device.cloud.fault = fault
    general, direct = await twins(device)
    record = await assert_alike(device, general, direct)
    assert direct.text == EDGE
    assert [attempt.target for attempt in record.outcome.attempts] == ["large", "small"]
    device.assert_nothing_leaks()


async def test_a_silent_cloud_is_given_up_in_time(tmp_path: Path) -> None:
    async with running(tmp_path, policy=hasty("large")) as device:
        device.cloud.fault = "stall"
        general, direct = await twins(device)
        record = await assert_alike(device, general, direct)
        assert record.outcome.attempts[0].error == "cloud_timeout"
        await until(lambda: device.cloud.running == 0)
        device.assert_nothing_leaks()


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_a_refusal_of_the_only_target_is_the_same_error(device: Device, status: int) -> None:
    device.cloud.status = status
    device.cloud.error = {"message": "The server's own words.", "code": "c", "param": "messages"}
    general, direct = await twins(device, model="large")
    assert direct.status == general.status
    assert direct.json == general.json
    records = [await device.record(one) for one in (general, direct)]
    assert stripped(msgspec.to_builtins(records[0].outcome)) == stripped(msgspec.to_builtins(records[1].outcome))
    device.assert_nothing_leaks()


async def test_a_connection_that_the_cloud_has_closed_is_replaced(device: Device) -> None:
    """The request is sent again, as by the general path: nothing of an answer has come."""
    watched = Watched.of(device)
    await chat(device)
    watched.begun.clear()
    closing = asyncio.Event()

    class Closing(ScriptedCloud):
        async def _answer(self, request: aiohttp.web.Request, body: dict[str, object]) -> aiohttp.web.StreamResponse:
            if not closing.is_set():
                closing.set()
                assert request.transport is not None
                request.transport.abort()
                raise asyncio.CancelledError
            return await super()._answer(request, body)

    device.cloud.__class__ = Closing
    answer = await chat(device)
    assert len(watched.begun) == 1
    assert answer.text == CLOUD
    record = await device.record(answer)
    assert [attempt.error for attempt in record.outcome.attempts] == [""]
    assert len(device.cloud.bodies) == 3


async def test_a_client_that_leaves_stops_the_work(device: Device) -> None:
    watched = Watched.of(device)
    async with client(device) as leaving:
        await chat(leaving)
        watched.begun.clear()
        device.cloud.gate = asyncio.Event()
        asking = asyncio.create_task(chat(leaving))
        await until(lambda: device.cloud.running == 1)
        assert len(watched.begun) == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: device.cloud.running == 0)
    await until(lambda: device.newest().outcome.status == "cancelled")
    assert device.newest().outcome.error == "client_gone"
    await until(lambda: device.app.in_flight == 0)
    device.assert_nothing_leaks()


async def test_a_client_that_leaves_as_the_answer_comes_leaves_nothing_behind(device: Device) -> None:
    """The task that goes on is begun before it hears of the lost connection."""
    watched = Watched.of(device)
    async with client(device) as leaving:
        await chat(leaving)
        watched.begun.clear()
        device.cloud.gate = asyncio.Event()
        asking = asyncio.create_task(chat(leaving))
        await until(lambda: device.cloud.running == 1)
        assert watched.connection.transport is not None
        watched.connection.transport.abort()
        watched.begun[0].cancel()  # in the same step of the loop
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: device.app.in_flight == 0)
    await until(lambda: device.newest().outcome.status == "cancelled")
    device.assert_nothing_leaks()


async def test_a_failure_before_it_is_sent_leaves_the_request_to_the_general_path(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cloud: CloudBackend, call: BackendRequest) -> None:
        raise RuntimeError("unforeseen")

    watched = Watched.of(device)
    async with client(device) as asking:
        await chat(asking)
        watched.begun.clear()
        monkeypatch.setattr(CloudBackend, "begin", fail)
        answer = await chat(asking)
    assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, CLOUD)
    assert not watched.begun
    device.assert_nothing_leaks()


async def test_a_daemon_that_ends_tells_so(tmp_path: Path) -> None:
    async with running(tmp_path, server=ServerConfig(port=0, drain_s=0.05)) as device:
        watched = Watched.of(device)
        await chat(device)
        watched.begun.clear()
        device.cloud.gate = asyncio.Event()
        asking = asyncio.create_task(chat(device))
        await until(lambda: device.cloud.running == 1)
        assert (len(watched.begun), device.app.in_flight) == (1, 1)
        assert await device.app.drain() is False
        await device.app.close()
        answer = await asking
        assert (answer.status, answer.code) == (503, "draining")
        assert (device.newest().outcome.status, device.newest().outcome.error) == ("error", "draining")
        device.assert_nothing_leaks()


async def test_requests_ahead_are_answered_in_order(device: Device) -> None:
    watched = Watched.of(device)
    reader, writer = await asyncio.open_connection("127.0.0.1", device.app.port)
    texts = [f"number {number}" for number in range(4)]
    for text in texts:
        document = {"model": "large", "messages": [{"role": "user", "content": text}], "temperature": 0.7}
        body = json.dumps(document).encode()
        head = f"POST {LISTED} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in texts:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 200 ")
        size = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
        assert json.loads(await reader.readexactly(size))["choices"][0]["message"]["content"] == CLOUD
    assert [one["messages"][0]["content"] for one in device.cloud.bodies] == texts  # type: ignore[index]
    assert len(watched.begun) >= 3  # the first one may open a connection to the cloud
    writer.close()


async def test_without_a_free_permit_it_waits_in_the_queue(device: Device) -> None:
    """The policy has four permits."""
    watched = Watched.of(device)
    async with client(device) as warm:
        await asyncio.gather(*[chat(warm) for _ in range(6)])
        watched.begun.clear()
        device.cloud.gate = asyncio.Event()
        asking = [asyncio.create_task(chat(warm)) for _ in range(6)]
        await until(lambda: device.parts.admission.waiting == 2)
        assert (len(watched.begun), device.parts.admission.running) == (4, 4)
        device.cloud.gate.set()
        assert [answer.text for answer in await asyncio.gather(*asking)] == [CLOUD] * 6
    device.assert_nothing_leaks()


@pytest.mark.parametrize(
    ("body", "tags"),
    [
        ({"temperature": 0}, "cloud"),
        ({"temperature": 0, "stream": True}, "cloud"),
        ({"n": 2}, "cloud"),
        ({}, "cloud,private"),
        ({}, "edge"),
        ({}, "handoff"),
        ({}, "cloud,in-region:eu"),
    ],
    ids=["cached", "streamed", "two", "private", "edge", "handoff", "region"],
)
async def test_other_requests_take_the_general_path(device: Device, body: dict[str, Any], tags: str) -> None:
    watched = Watched.of(device)
    await chat(device, tags=tags, **body)
    await chat(device, tags=tags, **body)
    assert not watched.begun
    device.assert_nothing_leaks()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"cloud" in request.tags', '"cloud" in request.tags && edge.queue < 100'),
        ("routes:\n", "guard: {rules: [{name: personal, action: mask, when: '\"never\" in request.tags'}]}\nroutes:\n"),
        ("routes:\n", "session: {}\nroutes:\n"),
        ("cache:\n", "cache:\n  - {when: '\"kept\" in request.tags', allow_sampled: true, exact: {ttl: 30s}}\n"),
    ],
    ids=["signals", "guard", "sessions", "samples"],
)
async def test_a_policy_that_needs_more_takes_the_general_path(tmp_path: Path, old: str, new: str) -> None:
    async with running(tmp_path, policy=POLICY.replace(old, new, 1)) as device:
        watched = Watched.of(device)
        for _ in range(2):
            assert (await chat(device)).text == CLOUD
        assert not watched.begun


def test_what_policies_and_calls_have_is_known_here() -> None:
    """A new field fails here: say in `Service.use` or `DirectAnswers` what it means for the plain case, then add it."""
    policy = (
        "name revision targets constraints part_constraints region_constraints routes cache limits shadow "
        "default_temperature own_temperature session adapted guard guard_settings places overflow "
        "budget_usd battery heat base claims paces_energy paced constraint_needs route_needs cache_needs offered "
        "compared target_names priced reads_only_features decisions named"
    ).split()
    call = (
        "id request target deadline first_token_by confidence_tokens traceparent policy cacheable durable "
        "report_upstream report_loosened job soft relay is_shadow choices regions begun encoded"
    ).split()
    assert [one.name for one in fields(Policy)] == policy
    assert [*BackendRequest.__struct_fields__] == call


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_that_has_begun_goes_on_although_its_token_has_expired(
    device: Device, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is admitted once, when it begins: its permit is given back, and its outcome is recorded."""
    watched = Watched.of(device)
    reader = device.app.api.reader
    async with client(device) as asking:
        await chat(asking, stream=stream)
        await chat(device)
        device.cloud.status = 503
        facts = reader.facts

        def once(http: HttpExchange) -> HeadFacts:
            monkeypatch.setattr(reader, "facts", expired)
            return facts(http)

        def expired(_: HttpExchange) -> HeadFacts:
            raise AuthenticationFailed("The token has expired.")

        monkeypatch.setattr(reader, "facts", once)
        watched.begun.clear()
        answer = await chat(asking, stream=stream)
        assert len(watched.begun) == 1
        monkeypatch.setattr(reader, "facts", facts)
    assert (answer.status, answer.text) == (200, EDGE)
    assert (await device.record(answer)).outcome.status == "ok"
    device.assert_nothing_leaks()
