"""The gateway's gRPC service before a real Triton, whose model does what the prompt says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from causeway_server.cloud_pool.grpc_api.messages import SERVICE, InputChunk
from causeway_server.cloud_pool.http.config import GrpcConfig
from tests.cloud_pool.conftest import Command, triton_environment
from tests.cloud_pool.dispatch.replica import Replica
from tests.e2e.sessions.gateway import FOREVER, TEMPLATE, Gateway, orders, replica, running, words
from tests.waiting import until

from .served import PATIENCE_S, Client, chat, connected, rest, text_of

__all__ = ["replica", "triton_environment"]

pytestmark = [pytest.mark.triton, pytest.mark.slow]
OF_THE_REQUEST = {"x-request-id", "x-causeway-tier", "x-causeway-tier-reason"}


@asynccontextmanager
async def serving(replica: Replica, folder: Path) -> AsyncIterator[tuple[Gateway, Client]]:
    async with running(replica, folder, grpc=GrpcConfig(port=0)) as gateway:
        assert gateway.app.grpc is not None
        async with connected(gateway.app.grpc.address) as client:
            yield gateway, client


def ask(mark: str, *told: dict[str, Any]) -> Any:
    return chat(orders(mark, *told), model="large")


async def test_a_call_is_the_request_that_http_would_be(replica: Replica, tmp_path: Path) -> None:
    """The same text, headers, usage and audit record; half of the prompt comes in a chunk of its own."""
    prompt = orders("same", *words(3))
    async with serving(replica, tmp_path) as (gateway, client), aiohttp.ClientSession() as session:
        body = {"model": "large", "messages": [{"role": "user", "content": prompt}]}
        async with session.post(f"{gateway.app.url}/chat/completions", json=body) as response:
            headers, answer = response.headers, await response.json()
        call = client.call(chat(prompt[:20], model="large"), InputChunk(text=prompt[20:]))
        outputs = await rest(call)
        initial = dict(await call.initial_metadata())
        await until(lambda: len(gateway.audit) == 2)
    assert text_of(outputs) == answer["choices"][0]["message"]["content"] == "w0 w1 w2 "
    assert [output.delta.finish_reason for output in outputs if output.delta.finish_reason] == ["stop"]
    assert outputs[-1].usage.completion_tokens == answer["usage"]["completion_tokens"]
    assert (outputs[0].head.tier, outputs[0].head.reason) == ("large", headers["x-causeway-tier-reason"])
    assert {name for name in map(str.lower, headers) if name in OF_THE_REQUEST} == OF_THE_REQUEST & initial.keys()
    of_http, of_grpc = gateway.audit
    differing = {name for name in of_http if of_http[name] != of_grpc[name]}
    assert differing <= {"at", "id", "route"}
    assert (of_grpc["route"], of_grpc["outcome"]) == ("generate", "ok")


async def test_the_health_is_that_of_an_inference(replica: Replica, tmp_path: Path) -> None:
    async with serving(replica, tmp_path) as (_, client):
        answer = await health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_cancelled_call_stops_the_work_in_triton(replica: Replica, tmp_path: Path) -> None:
    async with serving(replica, tmp_path) as (gateway, client):
        call = client.call(ask("call-cancelled", {"say": "w0 "}, FOREVER))
        assert text_of([await call.read(), await call.read()]) == "w0 "
        call.cancel()
        await until(lambda: "cancelled" in replica.noted("call-cancelled"))
        await until(lambda: [record["outcome"] for record in gateway.audit] == ["client_gone"])


async def test_a_deadline_that_passes_stops_the_work_in_triton(replica: Replica, tmp_path: Path) -> None:
    async with serving(replica, tmp_path) as (gateway, client):
        failure = await client.failure(client.call(ask("call-late", {"say": "w0 "}, FOREVER), timeout_s=1.0))
        assert failure.status == StatusCode.DEADLINE_EXCEEDED
        await until(lambda: replica.noted("call-late") == [] or "cancelled" in replica.noted("call-late"))
        await until(lambda: len(gateway.audit) == 1)
        assert gateway.audit[0]["outcome"] in ("deadline_exceeded", "client_gone")  # either side notices first


async def test_a_model_that_fails_in_the_middle_is_the_calls_status(replica: Replica, tmp_path: Path) -> None:
    async with serving(replica, tmp_path) as (_, client):
        call = client.call(ask("call-broken", {"say": "w0 "}, {"fail": ["INTERNAL", "it broke"]}))
        assert text_of([await call.read(), await call.read()]) == "w0 "
        failure = await client.failure(call)
        assert failure.status == StatusCode.UNAVAILABLE
        assert failure.message == failure.error["message"]


async def test_sigterm_lets_a_running_call_end(replica: Replica, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "gateway.yaml").write_text(
        "server: {port: 0}\ngrpc: {port: 0}\ntiers:\n  - {name: large, model: obedient, context_tokens: 4096, "
        f"template_file: template.jinja, triton: '{replica.address}'}}\n"
    )
    command = Command("serve", "--config", str(tmp_path / "gateway.yaml"))
    try:
        async with connected(command.ready()["grpc"]) as client:
            call = client.call(ask("call-drained", {"say": "w0 "}, {"wait": 0.5}, {"say": "w1 "}))
            assert text_of([await call.read(), await call.read()]) == "w0 "
            command.process.terminate()
            assert text_of(await rest(call)) == "w1 "
        with anyio.fail_after(PATIENCE_S):
            assert await anyio.to_thread.run_sync(command.process.wait) == 0
    finally:
        command.process.kill()
