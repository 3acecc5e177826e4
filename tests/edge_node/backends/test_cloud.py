"""The cloud backend against a real server: each fault's error, the circuit breaker and the probe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.backends.cloud.backend import CloudBackend
from causeway_server.edge_node.config.schema import CloudConfig
from causeway_server.router.errors import (
    BreakerOpen,
    CausewayError,
    CloudBodyTooLarge,
    CloudDisconnected,
    CloudFailed,
    CloudLegallyUnavailable,
    CloudNotFound,
    CloudPaymentRequired,
    CloudRefused,
    CloudRejected,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    CloudUnprocessable,
    CloudUnreachable,
    CloudUnreadable,
    ContextLengthExceeded,
    InvalidRequest,
    StreamBroken,
)
from causeway_server.router.serving.upstream.responses import MAX_ANSWER_BYTES, retry_after_s
from causeway_server.router.trackers import Breaker
from causeway_server.router.types import Chunk, Message, Request, Target
from tests.waiting import until

from ..scripted import CLOUD_WORDS, Fault, ScriptedCloud

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


class SlowBreaker(Breaker):
    failures = 3
    open_s = 60.0


@asynccontextmanager
async def connected(
    url: str, *, now: Callable[[], float] = time.monotonic, **more: object
) -> AsyncIterator[CloudBackend]:
    config = CloudConfig(url=url, connect_timeout_s=30.0, first_token_timeout_s=0.15, timeout_s=0.4, **more)  # type: ignore[arg-type]
    backend = CloudBackend(config, breaker=SlowBreaker(), now=now)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """A server whose chat completions are `answer`. Yields its base URL."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def call(
    *, stream: bool = False, confidence_tokens: int = 0, time_s: float = 60.0, first_s: float = 60.0
) -> BackendRequest:
    now = asyncio.get_running_loop().time()
    request = Request(kind="chat", model="auto", messages=(Message("user", "hi"),), stream=stream)
    return BackendRequest(
        "id", request, TARGET, now + time_s, now + first_s, confidence_tokens, choices=request.sequences
    )


async def answer_of(backend: CloudBackend, one: BackendRequest) -> str:
    async with aclosing(backend.generate(one)) as chunks:  # type: ignore[type-var]
        return "".join([chunk.text async for chunk in chunks])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_as_chunks(cloud: ScriptedCloud, stream: bool) -> None:
    """Complete or streamed: the text, one end, the usage last; the connection is reused."""
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
    """The first tokens must arrive one by one to be held back, even if the client does not stream."""
    async with connected(cloud.url) as backend:
        assert await answer_of(backend, call(confidence_tokens=4)) == CLOUD
        assert cloud.bodies[0]["stream"] is True


@pytest.mark.parametrize(
    ("fault", "stream", "kind"),
    [
        ("refuse", False, CloudDisconnected),
        ("refuse", True, CloudDisconnected),
        ("stall", False, CloudTimeout),
        ("stall", True, CloudTimeout),
        ("die", False, StreamBroken),
        ("die", True, StreamBroken),
        ("unfinished", True, StreamBroken),
        ("unfinished", False, StreamBroken),
        ("corrupt", False, CloudUnreadable),
        ("corrupt", True, CloudUnreadable),
        ("drip", False, CloudTimeout),
        ("drip", True, CloudTimeout),
    ],
)
async def test_every_fault_has_its_error(
    cloud: ScriptedCloud, fault: Fault, stream: bool, kind: type[CausewayError]
) -> None:
    """And the server's work has ended."""
    cloud.fault = fault
    async with connected(cloud.url) as backend:
        late = call(stream=stream, time_s=0.3, first_s=0.15)
        with pytest.raises(kind) as caught:
            await answer_of(backend, late if kind is CloudTimeout else call(stream=stream))
        assert type(caught.value) is kind
        assert caught.value.retryable
        await until(lambda: cloud.running == 0)


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "no", "param": "messages[0]"}, InvalidRequest),
        (400, {"message": "long", "code": "context_length_exceeded"}, ContextLengthExceeded),
        (
            400,
            {"message": "This model's maximum context length is 2048 tokens. However, you", "code": 400},
            ContextLengthExceeded,
        ),
        (400, {"message": "the request exceeds the available context size (4096)", "code": 400}, ContextLengthExceeded),
        (402, {"message": "no credit"}, CloudPaymentRequired),
        (413, {"message": "large", "param": "messages"}, CloudBodyTooLarge),
        (422, {"message": "no"}, CloudUnprocessable),
        (422, {"message": "long", "code": "context_length_exceeded"}, ContextLengthExceeded),
        (451, {"message": "not here"}, CloudLegallyUnavailable),
        (401, {"message": "the secret key"}, CloudRejected),
        (403, {"message": "the secret key"}, CloudRejected),
        (407, {"message": "the secret key"}, CloudRejected),
        (418, {"message": "a secret"}, CloudRejected),
        (404, {"message": "no such model"}, CloudNotFound),
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
    """The server's message is passed on only in errors that are the client's."""
    cloud.status, cloud.error = status, error
    cloud.headers = {"Retry-After": "3", "Location": "http://127.0.0.1:1/elsewhere"}
    async with connected(cloud.url) as backend:
        with pytest.raises(kind) as caught:
            await answer_of(backend, call())
        assert type(caught.value) is kind
        if isinstance(caught.value, InvalidRequest | CloudRefused):
            assert caught.value.message == error["message"]
            assert caught.value.param == error.get("param")
        else:
            assert "secret" not in caught.value.message
        assert caught.value.retry_after_s == (3.0 if kind in (CloudSaturated, CloudUnavailable) else None)


async def test_a_refused_connection_is_reported_quickly(cloud: ScriptedCloud) -> None:
    """The signals report it too."""
    await cloud.stop()
    async with connected(cloud.url) as backend:
        with pytest.raises(CloudUnreachable) as caught:
            await answer_of(backend, call())
        assert caught.value.phase == "connect"
        assert backend.signals().reachable is False


async def test_a_connection_that_the_server_closed_is_replaced(cloud: ScriptedCloud) -> None:
    """A pooled connection may be closed when it is reused: one retry on a new one."""
    async with connected(cloud.url) as backend:
        await answer_of(backend, call())
        for connection in cloud.connections:
            connection.force_close()
        assert await answer_of(backend, call()) == CLOUD


async def test_an_open_breaker_fails_calls_at_once(cloud: ScriptedCloud) -> None:
    cloud.status = 500
    async with connected(cloud.url) as backend:
        for _ in range(3):
            with pytest.raises(CloudFailed):
                await answer_of(backend, call())
        sent = len(cloud.bodies)
        with pytest.raises(BreakerOpen) as caught:
            await answer_of(backend, call())
        assert len(cloud.bodies) == sent
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 60.0
        assert backend.signals().breaker == "open"


@pytest.mark.parametrize("how", ["invalid", "full", "cancelled", "short deadline"])
async def test_errors_that_are_not_the_servers_do_not_open_the_breaker(cloud: ScriptedCloud, how: str) -> None:
    async with connected(cloud.url) as backend:
        for _ in range(6):
            cloud.status = {"invalid": 400, "full": 429}.get(how, 200)
            cloud.headers = {"Retry-After": "1"}
            cloud.fault = "stall" if how in ("cancelled", "short deadline") else "none"
            if how == "cancelled":
                cloud.entered.clear()
                leaving = asyncio.ensure_future(answer_of(backend, call()))
                await cloud.entered.wait()
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            else:
                with pytest.raises(CausewayError):
                    await answer_of(backend, call(stream=how == "short deadline", time_s=0.02))
        assert backend.signals().breaker == "closed"


async def test_a_503_with_retry_after_skips_the_model_until_then(cloud: ScriptedCloud) -> None:
    """The breaker stays closed, and other models are not affected."""
    clock = AheadClock()
    async with connected(cloud.url, now=clock) as backend:
        cloud.status, cloud.error, cloud.headers = 503, {"code": "cloud_unreachable"}, {"Retry-After": "30"}
        for sent in (1, 1, 1, 1, 1):
            with pytest.raises(CloudUnavailable) as caught:
                await answer_of(backend, call())
            assert len(cloud.bodies) == sent
            assert caught.value.retry_after_s is not None
            assert 0 < caught.value.retry_after_s <= 30.0
        signals = backend.signals()
        assert (signals.reachable, signals.breaker, signals.unavailable_models) == (True, "closed", ("m-large",))
        other = msgspec.structs.replace(call(), target=msgspec.structs.replace(TARGET, model="m-medium"))
        clock.ahead_s = 15.0
        with pytest.raises(CloudUnavailable):
            await answer_of(backend, other)
        assert len(cloud.bodies) == 2
        clock.ahead_s = 31.0
        cloud.status = 200
        assert await answer_of(backend, call()) == CLOUD
        assert backend.signals().unavailable_models == ("m-medium",)


async def test_a_long_retry_after_is_cut_to_a_minute(cloud: ScriptedCloud) -> None:
    cloud.status, cloud.error, cloud.headers = 503, {"code": "engine_unavailable"}, {"Retry-After": "3600"}
    async with connected(cloud.url) as backend:
        for _ in range(2):
            with pytest.raises(CloudUnavailable) as caught:
                await answer_of(backend, call())
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s <= 60.0


async def test_a_503_without_retry_after_opens_the_breaker(cloud: ScriptedCloud) -> None:
    cloud.status, cloud.error = 503, {"code": "cloud_unreachable"}
    async with connected(cloud.url) as backend:
        for _ in range(3):
            with pytest.raises(CloudUnavailable):
                await answer_of(backend, call())
        assert len(cloud.bodies) == 3
        assert (backend.signals().breaker, backend.signals().unavailable_models) == ("open", ())


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_call_ends_the_servers_work(cloud: ScriptedCloud, stream: bool) -> None:
    cloud.fault = "drip"
    async with connected(cloud.url) as backend:
        leaving = asyncio.ensure_future(answer_of(backend, call(stream=stream)))
        await until(lambda: cloud.running == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: cloud.running == 0)


async def test_the_probe_sets_reachability_and_round_trip(cloud: ScriptedCloud) -> None:
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


async def test_the_api_key_is_sent_and_proxies_of_the_environment_are_ignored(
    cloud: ScriptedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the environment is what is under test
    async with connected(cloud.url, key="t0ken") as backend:
        assert await answer_of(backend, call()) == CLOUD
        assert cloud.request_headers[0]["authorization"] == "Bearer t0ken"


async def test_the_tier_that_answered_is_a_signal(cloud: ScriptedCloud) -> None:
    cloud.headers = {"x-causeway-tier": "medium"}
    async with connected(cloud.url) as backend:
        await answer_of(backend, call())
        assert backend.signals().tier == "medium"


async def test_only_a_gateway_of_ours_gets_the_requests_id(cloud: ScriptedCloud) -> None:
    """llama_cpp.server 0.3.36 answers 400 to an `x-request-id` that is not a UUID."""
    async with connected(cloud.url) as backend:
        await answer_of(backend, call())
        assert "x-request-id" not in cloud.request_headers[-1]
        cloud.headers = {"x-causeway-tier": "medium"}
        await answer_of(backend, call())
        await answer_of(backend, call())
        assert cloud.request_headers[-1]["x-request-id"] == "id"


async def test_text_that_arrives_together_with_an_error_comes_first() -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        text = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
        await response.write(text + b'data: {"error":{"message":"out of memory"}}\n\n')
        return response

    async with serving(serve) as url, connected(url) as backend:
        chunks = backend.generate(call(stream=True))
        assert (await anext(chunks)).text == "half"
        with pytest.raises(CloudFailed, match="out of memory"):
            await anext(chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_an_end_is_bounded(stream: bool) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        piece = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 500_000 + b'"}}]}\n\n'
        while True:
            await response.write(piece)

    async with serving(serve) as url, connected(url) as backend:
        with pytest.raises(CloudFailed, match=str(MAX_ANSWER_BYTES)):
            await answer_of(backend, call(stream=stream))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("9" * 30, 3600.0), ("", None), ("soon", None), ("nan", None)],
)
def test_retry_after_is_seconds_or_a_date(text: str, seconds: float | None) -> None:
    assert retry_after_s(text) == seconds
    past = retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT")
    assert past == 0.0
