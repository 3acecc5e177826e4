"""A chat that a tier over HTTP answers in callbacks: answer, record, metrics and error are as from the general path.

The upstream sends the pieces of a script, as in the daemon's own tests of streams.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.accounts.tenants.config import TenantConfig, TenantsConfig, TierPrice
from causeway_server.cloud_pool.admission import AdmissionConfig
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.http.direct import DirectChat
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from causeway_server.router.errors import AuthenticationFailed
from causeway_server.router.serving.listener import Connection
from causeway_server.router.serving.request import PlainRequest
from causeway_server.router.serving.responses import TextExchange
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.edge_node.device import Answer
from tests.edge_node.scripted import CLOUD_WORDS, ScriptedCloud
from tests.edge_node.serving.test_direct_streams import (
    CASES,
    DONE,
    ROLE,
    STALL,
    STOP,
    WORDS,
    Script,
    StreamingCloud,
    event,
    texts,
)
from tests.own_task import in_own_task
from tests.waiting import until

_OWN = ("x-request-id", "date", "content-length")
_LARGE = {"messages": [{"role": "user", "content": "word " * 40_000}]}


class ProbedCloud(StreamingCloud):
    """Is well for the gateway's probes, which ask for one token."""

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        if body.get("max_tokens") == 1:
            return await ScriptedCloud._stream(self, request)  # noqa: SLF001
        return await super()._answer(request, body)


@pytest.fixture
async def cloud() -> AsyncIterator[StreamingCloud]:
    upstream = ProbedCloud()
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest.fixture
async def gateway(cloud: StreamingCloud, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with in_own_task(serving(tmp_path, http_tier(cloud.url))) as gateway:
        yield gateway


def id_of(answer: Answer) -> str:
    return next(value for name, value in answer.headers.items() if name.lower() == "x-request-id")


class Watch:
    """Counts the answers that were begun in callbacks, and those with which a task went on."""

    def __init__(self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.handed = 0
        self._listener = gateway.app.listener
        self._direct = self._listener.direct
        begin, hand_over = DirectChat.begin, Connection.hand_over

        def count_begun(answer: DirectChat) -> bool:
            is_begun = begin(answer)
            self.begun += is_begun
            return is_begun

        def count_handed(connection: Connection, http: PlainRequest) -> asyncio.Task[None]:
            self.handed += 1
            return hand_over(connection, http)

        monkeypatch.setattr(DirectChat, "begin", count_begun)
        monkeypatch.setattr(Connection, "hand_over", count_handed)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the general path answer."""
        self._listener.direct = None
        yield
        self._listener.direct = self._direct


def counts(gateway: Gateway) -> Counter[tuple[str, str]]:
    """Return the gateway's counters."""
    return Counter(
        {
            (sample.name, str(sorted(sample.labels.items()))): sample.value
            for family in gateway.app.runtime.metrics.registry.collect()
            for sample in family.samples
            if sample.name.endswith(("_total", "_count")) and "loop" not in sample.name
        }
    )


async def twins(
    gateway: Gateway, cloud: StreamingCloud, watch: Watch, script: Script, headers: Mapping[str, str] = {}, **body: Any
) -> tuple[Answer, Answer]:
    """Return the answers to the same request on the general path and in callbacks, which count the same."""
    answers, counted = [], []
    for is_direct in (False, True):
        cloud.script = ()
        await gateway.ask()  # leaves an idle connection to the upstream
        before, begun = counts(gateway), watch.begun
        cloud.script = script or (b"",)
        if is_direct:
            answers.append(await gateway.ask(headers=headers, **body))
            assert watch.begun == begun + 1, "it was not direct"
        else:
            with watch.off():
                answers.append(await gateway.ask(headers=headers, **body))
        await until(lambda: cloud.running == 0)
        await assert_nothing_leaks(gateway)
        counted.append(counts(gateway) - before)
    assert counted[0] == counted[1]
    return answers[0], answers[1]


async def assert_nothing_leaks(gateway: Gateway) -> None:
    """Check that no permit, lease, connection's place or memory of a request is left."""
    runtime, listener = gateway.app.runtime, gateway.app.listener
    await until(lambda: not listener.in_flight and not gateway.app.server.bodies.requests)
    for name, admission in runtime.admissions.items():
        assert (admission.scheduler.running, admission.scheduler.waiting) == (0, 0)
        assert not any(endpoint.open_since for endpoint in runtime.pools.by_tier[name].endpoints)


def normal(answer: Answer) -> bytes:
    """Return the body without its own id and time."""
    own = id_of(answer).encode()
    return re.sub(rb'"created":\d+', b'"created":0', answer.body.replace(own, b"ID"))


async def assert_alike(gateway: Gateway, general: Answer, direct: Answer) -> dict[str, object]:
    """Check that two answers and their records differ in ids and times alone. Returns the last record."""
    await until(lambda: {id_of(general), id_of(direct)} <= {record["id"] for record in gateway.audit})
    assert direct.status == general.status
    own = [
        {name: value for name, value in one.headers.items() if name.lower() not in _OWN} for one in (general, direct)
    ]
    assert own[0] == own[1]
    assert normal(direct) == normal(general)
    by_id = {record["id"]: {**record, "at": 0, "id": ""} for record in gateway.audit}
    records = [by_id[id_of(one)] for one in (general, direct)]
    assert records[0] == records[1]
    return records[1]


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_and_its_record_are_those_of_the_general_path(
    gateway: Gateway, cloud: StreamingCloud, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, case = Watch(gateway, monkeypatch), CASES[name]
    general, direct = await twins(gateway, cloud, watch, case.script, stream=True, **case.body)
    record = await assert_alike(gateway, general, direct)
    assert bool(watch.handed) is not case.direct
    assert record["outcome"] == "ok" or not case.direct


_WHOLE = (
    "plain",
    "cut within events",
    "no usage",
    "no DONE",
    "ends twice",
    "an error later",
    "broken off later",
    "nothing",
)


@pytest.mark.parametrize("name", _WHOLE)
async def test_a_whole_answer_and_its_record_are_those_of_the_general_path(
    gateway: Gateway, cloud: StreamingCloud, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(gateway, monkeypatch)
    general, direct = await twins(gateway, cloud, watch, CASES[name].script)
    await assert_alike(gateway, general, direct)
    assert bool(watch.handed) is not CASES[name].direct


async def test_tokens_pass_without_being_parsed(
    gateway: Gateway, cloud: StreamingCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = list[bytes](), TextExchange.take
    monkeypatch.setattr(TextExchange, "take", lambda *one: take(*one) and not taken.append(one[1]))
    general, direct = await twins(gateway, cloud, Watch(gateway, monkeypatch), [ROLE, *WORDS, STOP + DONE], stream=True)
    record = await assert_alike(gateway, general, direct)
    assert taken
    assert record["completion_tokens"] == len(WORDS)


@pytest.mark.parametrize("script", [[ROLE, STALL], [*WORDS, STALL], [event({"reasoning_content": "hm"}), STALL]])
async def test_a_silent_upstream_is_given_up_in_time(
    cloud: StreamingCloud, tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = UpstreamConfig(kind="openai", urls=(cloud.url,), verify_features=False, token_timeout_s=0.4)
    async with serving(tmp_path, http_tier(upstream=upstream)) as gateway:
        headers = {"x-causeway-deadline-ms": "800"}
        watch = Watch(gateway, monkeypatch)
        general, direct = await twins(gateway, cloud, watch, script, headers, stream=True)
        record = await assert_alike(gateway, general, direct)
        assert watch.handed == 1
        assert record["outcome"] == ("stream_broken" if script[0] is not ROLE else "deadline_exceeded")


@pytest.mark.parametrize("script", [[b"", STALL], [ROLE, STALL], [*WORDS, STALL], [*WORDS, STOP, STALL]])
async def test_a_client_that_leaves_stops_the_work(
    gateway: Gateway, cloud: StreamingCloud, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, outcomes = Watch(gateway, monkeypatch), []
    for is_direct in (False, True):
        cloud.script = ()
        await gateway.ask()
        cloud.script = script
        sent, mark = len(cloud.bodies), f"leaves-{is_direct}"
        with nullcontext() if is_direct else watch.off():
            asking = asyncio.create_task(gateway.ask(stream=True, headers={"x-request-id": mark}))
            await until(lambda: len(cloud.bodies) > sent)  # noqa: B023
        for _ in range(50):  # what was sent arrives
            await asyncio.sleep(0)
        asking.cancel()
        await until(lambda: cloud.running == 0 and gateway.audit[-1]["id"] == mark)  # noqa: B023
        outcomes.append({**gateway.audit[-1], "at": 0, "id": ""})
        await assert_nothing_leaks(gateway)
    assert outcomes[0] == outcomes[1]
    assert watch.handed == 1


@pytest.mark.parametrize("script", [[b"", STALL], [*WORDS, STALL]], ids=["before its first token", "later"])
async def test_what_the_end_of_the_drain_cuts_is_an_error(
    cloud: StreamingCloud, tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, http_tier(cloud.url)) as gateway:
        await gateway.ask()
        cloud.script, watch = script, Watch(gateway, monkeypatch)
        asking = asyncio.create_task(gateway.ask(stream=True))
        await until(lambda: cloud.running == 1)
        gateway.app.runner.stop()
        await gateway.app.listener.close()
        answer = await asking
        assert "draining" in answer.body.decode()
        await until(lambda: [record["outcome"] for record in gateway.audit] == ["ok", "draining"])
        assert (watch.begun, watch.handed) == (1, 1)
        await until(lambda: cloud.running == 0)


async def test_a_slow_client_gets_the_whole_answer(
    gateway: Gateway, cloud: StreamingCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task waits for it."""
    watch, words = Watch(gateway, monkeypatch), texts(*["word " * 20_000] * 40)
    await gateway.ask()
    cloud.script = [*words, STOP + DONE]
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", gateway.app.listener.port))
    reader, writer = await asyncio.open_connection(sock=slow, limit=1024)
    body = b'{"model":"large","messages":[{"role":"user","content":"a"}],"stream":true}'
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: watch.handed == 1)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += await reader.read(1 << 20)
    writer.close()
    assert received.count(b"word ") == 40 * 20_000
    assert b"[DONE]" in received
    await assert_nothing_leaks(gateway)


async def test_a_request_with_a_permit_that_is_revoked_waits_and_is_sent_again(
    cloud: StreamingCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = http_tier(cloud.url, concurrency=1, admission=AdmissionConfig(preemption_share=1.0))
    async with serving(tmp_path, tier) as gateway:
        await gateway.ask()
        watch = Watch(gateway, monkeypatch)
        cloud.script = [b"", STALL]
        sent = len(cloud.bodies)
        bulk = asyncio.create_task(gateway.ask(stream=True, headers={"x-causeway-priority": "bulk"}))
        await until(lambda: len(cloud.bodies) == sent + 1)
        cloud.script = ()
        urgent = await gateway.ask(stream=True, headers={"x-causeway-priority": "interactive"})
        assert (urgent.status, (await bulk).status) == (200, 200)
        assert (await bulk).done
        assert len(cloud.bodies) == sent + 3
        assert watch.handed == 1
        await assert_nothing_leaks(gateway)


@pytest.mark.parametrize("status", [400, 401, 429, 503])
@pytest.mark.parametrize("lower", [False, True], ids=["sole", "with a lower tier"])
async def test_a_refusal_is_answered_by_the_next_tier_or_the_same_error(
    cloud: StreamingCloud, tmp_path: Path, status: int, lower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await ScriptedCloud().start()
    tiers = (http_tier(cloud.url), http_tier(other.url, name="small"))
    degradation = DegradationConfig(tiers=("large", "small") if lower else (), warm_up_after_idle_s=0.0)
    async with serving(tmp_path, *tiers, degradation=degradation) as gateway:
        watch, answers = Watch(gateway, monkeypatch), []
        cloud.error = {"message": "m"}
        for is_direct in (False, True):
            cloud.error, cloud.status = {}, 200
            await gateway.ask()
            cloud.error, cloud.status = {"message": "m"}, status
            begun = watch.begun
            with nullcontext() if is_direct else watch.off():
                answers.append(await gateway.ask(stream=True))
            assert watch.begun == begun + is_direct
        record = await assert_alike(gateway, *answers)
        assert (record["tier"] == "small") is (lower and status in (429, 503))
        assert watch.handed == 1
        await assert_nothing_leaks(gateway)
    await other.stop()


async def test_a_tier_that_is_too_slow_is_followed_by_the_next_one(
    cloud: StreamingCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await ScriptedCloud().start()
    tiers = (http_tier(cloud.url, ttft_objective_s=0.05), http_tier(other.url, name="small"))
    degradation = DegradationConfig(tiers=("large", "small"), warm_up_after_idle_s=0.0)
    async with serving(tmp_path, *tiers, degradation=degradation) as gateway:
        general, direct = await twins(gateway, cloud, watch := Watch(gateway, monkeypatch), [b"", STALL], stream=True)
        record = await assert_alike(gateway, general, direct)
        assert (record["tier"], record["outcome"], watch.handed) == ("small", "ok", 1)
        assert direct.headers["x-causeway-tier-reason"] == "large=slow"
    await other.stop()


def bearer_of(issuer: Issuer, tenant: str) -> dict[str, str]:
    issued, now = {"issuer": "causeway", "audience": "causeway-cloud", "lifetime_s": 600.0}, time.time()
    bearer, _ = issue(issuer.key, tenant=tenant, device="d", scopes=("chat",), now=now, **issued)  # type: ignore[arg-type]
    return {"authorization": f"Bearer {bearer}"}


async def test_an_answer_ends_when_its_token_is_revoked(
    cloud: StreamingCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Revoked:
        def check(self, *_: object) -> None: ...

        def check_again(self, *_: object) -> None:
            if cloud.rest is not None and cloud.rest.is_set():
                raise AuthenticationFailed("The token has been revoked.")

    issuer = Issuer(tmp_path)
    async with serving(tmp_path, http_tier(cloud.url), identity=issuer.config) as gateway:
        runner = gateway.app.runner
        assert runner.callers is not None
        runner.callers = structs.replace(runner.callers, revocations=Revoked())
        watch, headers = Watch(gateway, monkeypatch), bearer_of(issuer, "acme")
        await gateway.ask(headers=headers)
        cloud.rest = asyncio.Event()
        asking = asyncio.create_task(gateway.ask(stream=True, headers=headers))
        await until(lambda: cloud.running == 1)
        for _ in range(50):  # the first words arrive
            await asyncio.sleep(0)
        cloud.rest.set()
        answer = (await asking).body.decode()
        assert "says" in answer
        assert f'"{CLOUD_WORDS[-1]}"' not in answer
        assert "The token has been revoked." in answer
        await until(lambda: gateway.audit[-1]["outcome"] == "invalid_api_key")
        assert not caplog.records
        assert (watch.begun, watch.handed) == (1, 1)
        await assert_nothing_leaks(gateway)


async def test_two_tenants_each_within_its_own_budget(cloud: StreamingCloud, tmp_path: Path) -> None:
    """What a stream may cost is reserved until its end; then it pays for what it used."""
    issuer = Issuer(tmp_path)
    tenants = TenantsConfig(
        overrides=(TenantConfig(name="poor", usd_per_day=0.0015), TenantConfig(name="rich", usd_per_day=5.0)),
        prices=(TierPrice(tier="large", input=0.0, output=10.0),),
    )
    async with serving(tmp_path, http_tier(cloud.url), identity=issuer.config, tenants=tenants) as gateway:

        async def ask(tenant: str, **more: Any) -> Answer:
            return await gateway.ask(headers=bearer_of(issuer, tenant), max_tokens=100, **more)

        assert (await ask("rich")).status == 200
        cloud.script = [*WORDS, STALL]
        held = asyncio.create_task(ask("poor", stream=True))
        await until(lambda: cloud.running == 1)
        cloud.script = ()
        assert [(await ask(tenant, stream=True)).status for tenant in ("poor", "rich")] == [429, 200]
        held.cancel()
        await until(lambda: len(gateway.audit) == 4)
        (left,) = [one for one in gateway.audit if one["outcome"] == "client_gone"]
        assert left["tenant"] == "poor"
        assert left["completion_tokens"] in range(1, len(WORDS) + 1)
        assert (await ask("poor", stream=True)).status == 200
