"""The gRPC address on a real socket with real clients, and peers that are wrong, slow, silent or too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.request_context import Piece, RequestContext, answer_head
from causeway_server.cloud_pool.grpc_api.messages import SERVICE, InputChunk
from causeway_server.cloud_pool.grpc_api.server import MAX_CHUNK_BYTES, GrpcServer
from causeway_server.cloud_pool.http.config import GrpcConfig, ServerConfig
from causeway_server.router.errors import ConfigError, StreamBroken
from causeway_server.router.types import Chunk
from tests.cloud_pool.accounts.identity.gateway import static_token_config
from tests.waiting import until

from .served import PATIENCE_S, Served, always, chat, connected, rest, serving, text_of

pytestmark = pytest.mark.slow
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def http_error(served: Served, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    _, answer = await served.gateway.post(token, body)
    error: dict[str, Any] = answer["error"]
    return error


async def test_an_answer_is_its_head_its_text_and_its_usage() -> None:
    async with serving() as served:
        call = served.client.call(chat(), metadata=[("x-request-id", "r1"), ("x-causeway-tags", "a")])
        outputs = await rest(call)
        head, usage = outputs[0].head, outputs[-1].usage
        assert (head.request_id, head.tier, head.reason) == ("r1", "assistant-large", "asked")
        assert text_of(outputs) == "my secret answer"
        assert outputs[-2].delta.finish_reason == "stop"
        assert (usage.prompt_tokens, usage.completion_tokens) == (20, 10)
        initial = dict(await call.initial_metadata())
        assert (initial["x-request-id"], initial["x-causeway-tier"]) == ("r1", "assistant-large")
        assert served.gateway.service.calls[0].request.hints.tags == ("a",)
        assert 'requests_total{outcome="ok",tier="assistant-large"} 1.0' in served.gateway.metrics()


async def test_metadata_is_read_as_headers_are() -> None:
    """Lists are joined, tags have no case, and a name with two values is refused."""
    async with serving() as served:
        await rest(served.client.call(chat(), metadata=[("x-causeway-tags", "B"), ("x-causeway-tags", "a")]))
        assert served.gateway.service.calls[-1].request.hints.tags == ("a", "b")
        same = [("x-causeway-priority", "bulk")] * 2
        await rest(served.client.call(chat(), metadata=same))
        for name, first, second in (
            ("x-causeway-priority", "bulk", "standard"),
            ("x-causeway-deadline-ms", "0", "0"),
            ("x-causeway-tags", "a b", "c"),
        ):
            call = served.client.call(chat(), metadata=[(name, first), (name, second)])
            failure = await served.client.failure(call)
            assert (failure.status, failure.error["param"]) == (StatusCode.INVALID_ARGUMENT, name)
        assert len(served.gateway.service.calls) == 2


async def test_grpcs_deadline_is_the_requests() -> None:
    async with serving() as served:
        await rest(served.client.call(chat(), timeout_s=PATIENCE_S))
        context = served.gateway.service.calls[-1]
        assert context.request.hints.deadline_ms is not None
        assert 0 < context.request.hints.deadline_ms < 2 * PATIENCE_S * 1000  # gRPC rounds it up
        sooner = [("x-causeway-deadline-ms", "30000")]
        await rest(served.client.call(chat(), metadata=sooner, timeout_s=PATIENCE_S))
        assert served.gateway.service.calls[-1].request.hints.deadline_ms == 30_000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "none"}, StatusCode.NOT_FOUND),
        ({"temperature": 9.0}, StatusCode.INVALID_ARGUMENT),
        ({"messages": [{"role": "king", "content": "Hi"}]}, StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_an_error_says_what_http_says(body: dict[str, Any], status: StatusCode) -> None:
    request = {"model": "assistant-large", "messages": [{"role": "user", "content": "Hi"}], **body}
    async with serving() as served:
        failure = await served.client.failure(served.client.call(InputChunk(request=request)))
        same = await http_error(served, request)
        assert (failure.status, failure.message, failure.error) == (status, same["message"], same)
        assert failure.trailing["x-causeway-error-code"] == same["code"]


async def test_a_token_is_verified_before_anything_is_read(tmp_path: Path) -> None:
    async with serving(Config(server=static_token_config(tmp_path))) as served:
        for metadata in ([], [("authorization", "Bearer wrong")]):
            failure = await served.client.failure(served.client.open(metadata=metadata))  # its input never ends
            assert failure.status == StatusCode.UNAUTHENTICATED
            assert failure.trailing["www-authenticate"] == "Bearer"
        answer = await served.client.answer(chat(), metadata=[("authorization", "Bearer secret")])
        assert text_of(answer) == "my secret answer"
        assert served.gateway.service.calls[0].request.hints.client == "kiosk"


async def test_two_tokens_in_one_call_are_refused(tmp_path: Path) -> None:
    async with serving(Config(server=static_token_config(tmp_path))) as served:
        tokens = [("authorization", "Bearer secret"), ("authorization", "Bearer wrong")]
        failure = await served.client.failure(served.client.call(chat(), metadata=tokens))
        assert (failure.status, failure.error["param"]) == (StatusCode.INVALID_ARGUMENT, "authorization")
        assert served.gateway.service.calls == []


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ([b"\xff\xff\xff"], "invalid_value"),
        ([InputChunk(text="Hi")], "invalid_value"),
        ([], "missing_required_parameter"),
        ([chat(), b"\x0a\xff"], "invalid_value"),
    ],
    ids=["garbage", "text first", "empty", "garbage later"],
)
async def test_an_input_that_is_none_is_refused(chunks: list[Any], code: str) -> None:
    async with serving() as served:
        failure = await served.client.failure(served.client.call(*chunks))
        assert (failure.status, failure.error["code"]) == (StatusCode.INVALID_ARGUMENT, code)
        assert served.calls.active == 0


async def test_a_misspelt_name_of_ours_in_metadata_is_refused() -> None:
    async with serving() as served:
        failure = await served.client.failure(served.client.call(chat(), metadata=[("x-causeway-tag", "private")]))
        assert failure.error["code"] == "unknown_parameter"


async def test_an_input_that_floods_is_bounded() -> None:
    """Many chunks, and one that is too large: neither is kept."""
    async with serving(Config(server=ServerConfig(max_body_bytes=250_000))) as served:
        call = served.client.open()
        for chunk in (chat(), *[InputChunk(text="x" * 100_000)] * 3):
            await call.write(chunk)
        failure = await served.client.failure(call)
        assert (failure.status, failure.error["code"]) == (StatusCode.RESOURCE_EXHAUSTED, "body_too_large")
        failure = await served.client.failure(served.client.call(chat("x" * MAX_CHUNK_BYTES)))
        assert failure.status == StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: served.calls.active == 0)
        assert served.gateway.bodies.held_bytes == 0
        assert served.gateway.service.calls == []


async def test_an_input_that_does_not_end_is_ended() -> None:
    async with serving(read_timeout_s=1.0) as served:
        silent, begun = served.client.open(), served.client.open()
        await begun.write(chat())
        for call in (silent, begun):
            failure = await served.client.failure(call)
            assert (failure.status, failure.error["code"]) == (StatusCode.DEADLINE_EXCEEDED, "request_timeout")


async def test_a_client_that_leaves_before_its_input_ends_gets_no_answer() -> None:
    async with serving() as served:
        served.gateway.service.held = anyio.Event()
        call = served.client.open()
        await call.write(chat())
        await until(lambda: served.calls.active == 1)
        call.cancel()
        await until(lambda: served.calls.active == 0)
        assert 'outcome="ok"' not in served.gateway.metrics()


async def test_calls_beyond_the_limit_are_refused() -> None:
    async with serving(max_calls=1) as served:
        first = served.client.open()
        await first.write(chat())
        await until(lambda: served.calls.active == 1)
        failure = await served.client.failure(served.client.call(chat()))
        assert (failure.status, failure.error["code"]) == (StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        await first.done_writing()
        assert text_of(await rest(first)) == "my secret answer"


async def test_a_cancelled_call_ends_its_answer() -> None:
    async with serving() as served:
        served.gateway.service.held = anyio.Event()
        call = served.client.call(chat())
        with anyio.fail_after(PATIENCE_S):
            await served.gateway.service.reached.wait()
        call.cancel()
        await until(lambda: served.calls.active == 0)
        assert 'requests_total{outcome="client_gone",tier="assistant-large"} 1.0' in served.gateway.metrics()


async def test_an_answer_that_breaks_ends_with_its_error() -> None:
    async with serving() as served:
        served.gateway.service.fault = StreamBroken("it broke", phase="stream")
        call = served.client.call(chat())
        read = [await call.read() for _ in range(2)]
        failure = await served.client.failure(call)
        assert text_of(read) == "my secret "
        assert (failure.status, failure.error["code"]) == (StatusCode.UNAVAILABLE, "stream_broken")


async def test_a_client_that_stops_reading_holds_little_and_is_given_up() -> None:
    """gRPC buffers what its flow control allows; then the answer waits, and after `stalled_s` its work ends."""
    made, ended = 0, asyncio.Event()

    async def endless(context: RequestContext) -> AsyncGenerator[Piece, None]:
        nonlocal made
        yield answer_head(context.tier.name, "asked")
        try:
            while True:
                made += 1
                yield Chunk("x" * 16_384, tokens=1)
        finally:
            ended.set()

    async with serving(answers=CachingService(None, endless), stalled_s=0.3) as served:
        call = served.client.call(chat())
        assert (await call.read()).head.tier
        with anyio.fail_after(PATIENCE_S):
            await ended.wait()
        await until(lambda: served.calls.active == 0)
        assert made * 16_384 < 4 * 1024 * 1024
        failure = await served.client.failure(call)
        assert failure.status == StatusCode.CANCELLED
        assert 'requests_total{outcome="client_gone",tier="assistant-large"} 1.0' in served.gateway.metrics()


async def test_connections_that_say_nothing_or_garbage_are_closed() -> None:
    async with serving(handshake_s=0.3) as served:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 8):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
            writer.write(said)
            with anyio.fail_after(PATIENCE_S):
                try:
                    while await reader.read(65536):
                        pass
                except ConnectionError:
                    pass
            writer.close()
        assert text_of(await served.client.answer(chat())) == "my secret answer"


async def test_a_gateway_that_drains_says_so_and_ends_what_runs() -> None:
    async with serving() as served:
        service = served.gateway.service
        service.held = anyio.Event()
        health = health_pb2_grpc.HealthStub(served.client.channel)
        assert [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", SERVICE)] == [
            SERVING,
            SERVING,
        ]
        running = served.client.call(chat())
        with anyio.fail_after(PATIENCE_S):
            await service.reached.wait()
        served.gateway.server.begin_draining()
        await served.server.tell_draining()
        assert (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == NOT_SERVING
        failure = await served.client.failure(served.client.call(chat()))
        assert (failure.status, failure.error["code"]) == (StatusCode.UNAVAILABLE, "draining")
        service.held.set()
        assert text_of(await rest(running)) == "my secret answer"
        await served.server.drain(PATIENCE_S)
        assert served.calls.active == 0


async def test_a_client_without_the_proto_learns_it_by_reflection_and_calls() -> None:
    """As `grpcurl` does. The library's client blocks, so it has a thread."""

    def ask(address: str) -> tuple[list[str], str]:
        import grpc

        with grpc.insecure_channel(address) as channel:
            found = ProtoReflectionDescriptorDatabase(channel)
            services = sorted(found.get_services())
            pool = descriptor_pool.DescriptorPool(found)
            method = pool.FindServiceByName(SERVICE).methods_by_name["Generate"]
            send, receive = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
            stub = channel.stream_stream(
                f"/{SERVICE}/{method.name}",
                request_serializer=send.SerializeToString,
                response_deserializer=receive.FromString,
            )
            request = {"model": "assistant-large", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            return services, text_of(stub(iter([send(request=request)]), timeout=PATIENCE_S))

    async with serving() as served:
        services, text = await anyio.to_thread.run_sync(ask, served.server.address)
        assert services == [SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
        assert text == "my secret answer"


async def test_the_health_of_the_service_is_its_readiness() -> None:
    """The process itself serves all the same; who watches is told."""
    answers = iter([True, False, True])

    async def ready() -> bool:
        return next(answers)

    async with serving(ready=ready) as served:
        health = health_pb2_grpc.HealthStub(served.client.channel)
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = health.Watch(asked, timeout=PATIENCE_S)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.UNKNOWN
        for status in (SERVING, NOT_SERVING, SERVING):
            assert (await health.Check(asked)).status == status
            assert (await watch.read()).status == status
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
        watch.cancel()


async def test_a_taken_port_is_told() -> None:
    async with serving() as served:
        second = GrpcServer(GrpcConfig(port=served.server.port), Config().server, served.calls, always)
        with pytest.raises(ConfigError, match=r"grpc\.port: Cannot listen on 127\.0\.0\.1:\d+"):
            await second.start()


async def test_two_clients_share_no_fate() -> None:
    """One that is cut in the middle leaves the other's answer whole."""
    async with serving() as served, connected(served.server.address) as other:
        served.gateway.service.held = anyio.Event()
        whole = served.client.call(chat())
        cut = other.call(chat())
        await until(lambda: len(served.gateway.service.calls) == 2)
        cut.cancel()
        await until(lambda: served.calls.active == 1)
        served.gateway.service.held.set()
        assert text_of(await rest(whole)) == "my secret answer"


async def test_an_answer_that_is_whole_has_its_status_though_the_address_closes() -> None:
    """A gateway stops as soon as no call is in progress; the status is then still on its way."""
    async with serving() as served:
        served.gateway.service.held = anyio.Event()
        calls = [served.client.call(chat()) for _ in range(20)]
        await until(lambda: len(served.gateway.service.calls) == len(calls))
        served.gateway.service.held.set()
        await served.server.drain(PATIENCE_S)
        await served.server.close()
        assert {text_of(await rest(call)) for call in calls} == {"my secret answer"}
