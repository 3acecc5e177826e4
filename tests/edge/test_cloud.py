"""The cloud backend against a real server: what each bad day of it becomes, and what breaker and probe make of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from edge_node.backends.backend import BackendRequest
from edge_node.backends.cloud.backend import CloudBackend
from edge_node.backends.cloud.error_mapping import retry_after_s
from edge_node.backends.cloud.response_reader import MAX_ANSWER_BYTES
from edge_node.config.schema import CloudConfig
from router.decision.breaker import Breaker
from router.errors import (
    BreakerOpen,
    CausewayError,
    CloudFailed,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    CloudUnreachable,
    ContextLengthExceeded,
    InvalidRequest,
    StreamBroken,
)
from router.types import Chunk, Message, Request, Target

from .scripted import CLOUD_WORDS, Fault, ScriptedCloud, until

TARGET = Target("large", "cloud", "m-large")
CLOUD = "".join(CLOUD_WORDS)


@pytest.fixture
async def cloud() -> AsyncIterator[ScriptedCloud]:
    cloud = await ScriptedCloud().start()
    yield cloud
    await cloud.stop()


class AheadClock:
    """The real clock, `ahead_s` seconds ahead."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@asynccontextmanager
async def connected(
    url: str, *, now: Callable[[], float] = time.monotonic, **more: object
) -> AsyncIterator[CloudBackend]:
    config = CloudConfig(url=url, connect_timeout_s=0.3, first_token_timeout_s=0.15, timeout_s=0.4, **more)  # type: ignore[arg-type]
    backend = CloudBackend(config, breaker=Breaker(failures=3, open_s=60.0), now=now)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def call(
    *, stream: bool = False, confidence_tokens: int = 0, time_s: float = 5.0, first_s: float = 0.15
) -> BackendRequest:
    now = asyncio.get_running_loop().time()
    request = Request(kind="chat", model="auto", messages=(Message("user", "hi"),), stream=stream)
    return BackendRequest("id", request, TARGET, now + time_s, now + first_s, confidence_tokens, "")


async def said(backend: CloudBackend, one: BackendRequest) -> str:
    async with aclosing(backend.generate(one)) as chunks:  # type: ignore[type-var]
        return "".join([chunk.text async for chunk in chunks])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_as_chunks(cloud: ScriptedCloud, stream: bool) -> None:
    """Whole or streamed: the text, one end, the usage last, and the connection is used again."""
    async with connected(cloud.url) as backend:
        for _ in range(2):
            async with aclosing(backend.generate(call(stream=stream))) as stream_of:  # type: ignore[type-var]
                chunks: list[Chunk] = [chunk async for chunk in stream_of]
            assert "".join(chunk.text for chunk in chunks) == CLOUD
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
            assert chunks[-1].usage is not None
            assert cloud.bodies[-1].get("stream", False) is stream
        assert len(cloud.connections) == 1
        assert backend.signals().breaker == "closed"


async def test_a_possible_handoff_is_streamed(cloud: ScriptedCloud) -> None:
    """To hold back first tokens they have to come one by one, whatever the client asked for."""
    async with connected(cloud.url) as backend:
        assert await said(backend, call(confidence_tokens=4)) == CLOUD
        assert cloud.bodies[0]["stream"] is True


@pytest.mark.parametrize(
    ("fault", "stream", "kind"),
    [
        ("refuse", False, CloudUnreachable),
        ("refuse", True, CloudUnreachable),
        ("stall", False, CloudTimeout),
        ("stall", True, CloudTimeout),
        ("die", False, StreamBroken),
        ("die", True, StreamBroken),
        ("unfinished", True, StreamBroken),
        ("unfinished", False, StreamBroken),
        ("corrupt", False, CloudFailed),
        ("corrupt", True, CloudFailed),
        ("drip", False, CloudTimeout),
        ("drip", True, CloudTimeout),
    ],
)
async def test_every_fault_has_its_error(
    cloud: ScriptedCloud, fault: Fault, stream: bool, kind: type[CausewayError]
) -> None:
    """Each way to break is told apart, and the server's work has ended."""
    cloud.fault = fault
    async with connected(cloud.url) as backend:
        with pytest.raises(kind) as caught:
            await said(backend, call(stream=stream, time_s=0.3 if kind is CloudTimeout else 30.0))
        assert type(caught.value) is kind
        assert caught.value.retryable
        await until(lambda: cloud.running == 0)


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "no", "param": "messages[0]"}, InvalidRequest),
        (400, {"message": "long", "code": "context_length_exceeded"}, ContextLengthExceeded),
        (422, {"message": "no"}, InvalidRequest),
        (401, {"message": "who?"}, CloudRejected),
        (403, {"message": "no"}, CloudRejected),
        (404, {"message": "no such model"}, CloudRejected),
        (307, {}, CloudFailed),
        (408, {}, CloudTimeout),
        (429, {"message": "full"}, CloudSaturated),
        (503, {"message": "full"}, CloudSaturated),
        (503, {"message": "full", "code": "overloaded"}, CloudSaturated),
        (503, {"message": "going", "code": "draining"}, CloudSaturated),
        (503, {"message": "a secret", "code": "cloud_unreachable"}, CloudUnavailable),
        (503, {"message": "a secret", "code": "engine_unavailable"}, CloudUnavailable),
        (503, {"message": "a secret", "code": "identity_unavailable"}, CloudUnavailable),
        (429, {"message": "full", "code": "cloud_unreachable"}, CloudSaturated),
        (500, {"message": "a secret traceback"}, CloudFailed),
        (504, {}, CloudTimeout),
    ],
)
async def test_every_status_has_its_error(
    cloud: ScriptedCloud, status: int, error: dict[str, object], kind: type[CausewayError]
) -> None:
    """What the server says it is; its words travel only where they are the caller's business."""
    cloud.status, cloud.error = status, error
    cloud.headers = {"Retry-After": "3", "Location": "http://127.0.0.1:1/elsewhere"}
    async with connected(cloud.url) as backend:
        with pytest.raises(kind) as caught:
            await said(backend, call())
        assert type(caught.value) is kind
        if isinstance(caught.value, InvalidRequest):
            assert caught.value.message == error["message"]
            assert caught.value.param == error.get("param")
        else:
            assert "secret" not in caught.value.message
        assert caught.value.retry_after_s == (3.0 if kind in (CloudSaturated, CloudUnavailable) else None)


async def test_nobody_listens(cloud: ScriptedCloud) -> None:
    """A refused connection is told quickly, and the signals know."""
    await cloud.stop()
    async with connected(cloud.url) as backend:
        with pytest.raises(CloudUnreachable) as caught:
            await said(backend, call())
        assert caught.value.phase == "connect"
        assert backend.signals().reachable is False


async def test_a_connection_that_the_server_closed_is_replaced_unseen(cloud: ScriptedCloud) -> None:
    """A kept connection may be dead when it is used: a fresh one is tried before anybody is told."""
    async with connected(cloud.url) as backend:
        await said(backend, call())
        for connection in cloud.connections:
            connection.force_close()
        assert await said(backend, call()) == CLOUD


async def test_a_breaker_that_opens_asks_nobody(cloud: ScriptedCloud) -> None:
    """After failures in a row calls end at once, with the time until the next try."""
    cloud.fault = "corrupt"
    async with connected(cloud.url) as backend:
        for _ in range(3):
            with pytest.raises(CloudFailed):
                await said(backend, call())
        asked = len(cloud.bodies)
        with pytest.raises(BreakerOpen) as caught:
            await said(backend, call())
        assert len(cloud.bodies) == asked
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 60.0
        assert backend.signals().breaker == "open"


@pytest.mark.parametrize("how", ["wrong ask", "full", "left", "hasty"])
async def test_what_is_not_the_servers_fault_does_not_open_the_breaker(cloud: ScriptedCloud, how: str) -> None:
    """Bad asks, a full server that says so, callers who leave or have no time: the server is well."""
    async with connected(cloud.url) as backend:
        for _ in range(6):
            cloud.status = {"wrong ask": 400, "full": 429}.get(how, 200)
            cloud.headers = {"Retry-After": "1"}
            cloud.fault = "stall" if how in ("left", "hasty") else "none"
            if how == "left":
                cloud.entered.clear()
                leaving = asyncio.ensure_future(said(backend, call()))
                await cloud.entered.wait()
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            else:
                with pytest.raises(CausewayError):
                    await said(backend, call(stream=how == "hasty", time_s=0.02))
        assert backend.signals().breaker == "closed"


async def test_a_503_with_retry_after_skips_the_model_until_then(cloud: ScriptedCloud) -> None:
    """The breaker stays closed, and other models are not affected."""
    clock = AheadClock()
    async with connected(cloud.url, now=clock) as backend:
        cloud.status, cloud.error, cloud.headers = 503, {"code": "cloud_unreachable"}, {"Retry-After": "30"}
        for sent in (1, 1, 1, 1, 1):
            with pytest.raises(CloudUnavailable) as caught:
                await said(backend, call())
            assert len(cloud.bodies) == sent
            assert caught.value.retry_after_s is not None
            assert 0 < caught.value.retry_after_s <= 30.0
        signals = backend.signals()
        assert (signals.reachable, signals.breaker, signals.unavailable_models) == (True, "closed", ("m-large",))
        other = msgspec.structs.replace(call(), target=msgspec.structs.replace(TARGET, model="m-medium"))
        clock.ahead_s = 15.0
        with pytest.raises(CloudUnavailable):
            await said(backend, other)
        assert len(cloud.bodies) == 2
        clock.ahead_s = 31.0
        cloud.status = 200
        assert await said(backend, call()) == CLOUD
        assert backend.signals().unavailable_models == ("m-medium",)


async def test_a_server_that_keeps_models_away_for_hours_is_asked_sooner(cloud: ScriptedCloud) -> None:
    """Whatever it says: a minute at most."""
    cloud.status, cloud.error, cloud.headers = 503, {"code": "engine_unavailable"}, {"Retry-After": "3600"}
    async with connected(cloud.url) as backend:
        for _ in range(2):
            with pytest.raises(CloudUnavailable) as caught:
                await said(backend, call())
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s <= 60.0


async def test_an_unavailable_server_that_says_no_time_opens_the_breaker(cloud: ScriptedCloud) -> None:
    """It is asked until the breaker has had enough."""
    cloud.status, cloud.error = 503, {"code": "cloud_unreachable"}
    async with connected(cloud.url) as backend:
        for _ in range(3):
            with pytest.raises(CloudUnavailable):
                await said(backend, call())
        assert len(cloud.bodies) == 3
        assert (backend.signals().breaker, backend.signals().unavailable_models) == ("open", ())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_leaves_ends_the_servers_work(cloud: ScriptedCloud, stream: bool) -> None:
    """Closing the iterator closes the connection, and the server notices."""
    cloud.fault = "drip"
    async with connected(cloud.url) as backend:
        leaving = asyncio.ensure_future(said(backend, call(stream=stream)))
        await until(lambda: cloud.running == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: cloud.running == 0)


async def test_the_probe_finds_out(cloud: ScriptedCloud) -> None:
    """Reachability and round trip come from a probe; nobody knew before."""
    async with connected(cloud.url) as backend:
        assert backend.signals().reachable is None
        assert await backend.probe()
        signals = backend.signals()
        assert signals.reachable
        assert signals.rtt_ms is not None
        assert 0 < signals.rtt_ms < 5000
        await cloud.stop()
        assert not await backend.probe()
        assert backend.signals().reachable is False


async def test_the_key_is_sent_and_the_environment_is_not_asked(
    cloud: ScriptedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bearer token travels; a proxy in the environment does not get to see it."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the environment is what is under test
    async with connected(cloud.url, api_key="t0ken") as backend:
        assert await said(backend, call()) == CLOUD
        assert cloud.asked[0]["authorization"] == "Bearer t0ken"


async def test_the_tier_that_answered_is_a_signal(cloud: ScriptedCloud) -> None:
    """Our gateway says which tier it was."""
    cloud.headers = {"x-causeway-tier": "medium"}
    async with connected(cloud.url) as backend:
        await said(backend, call())
        assert backend.signals().tier == "medium"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_an_end_is_bounded(stream: bool) -> None:
    """A server that sends for ever is cut off at the bound."""

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        piece = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 500_000 + b'"}}]}\n\n'
        while True:
            await response.write(piece)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with connected(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as backend:
        with pytest.raises(CloudFailed, match=str(MAX_ANSWER_BYTES)):
            await said(backend, call(stream=stream, time_s=30.0, first_s=30.0))
    await runner.cleanup()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("9" * 30, 3600.0), ("", None), ("soon", None), ("nan", None)],
)
def test_retry_after_is_read_as_it_may_be_written(text: str, seconds: float | None) -> None:
    """Seconds, or a date; nonsense is nothing."""
    assert retry_after_s(text) == seconds
    past = retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT")
    assert past == 0.0
