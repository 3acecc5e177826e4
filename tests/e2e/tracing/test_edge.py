"""The daemon's traces, as a collector receives them: one span per request and per attempt, and no content."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from causeway_server.router.config import TracingConfig
from tests.edge_node.device import Device, running
from tests.waiting import until

from .collector import Collector, Span

SERVER, CLIENT, INTERNAL = 2, 3, 1
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = await Collector().start()
    yield found
    await found.stop()


@pytest.fixture
async def device(tmp_path: Path, collector: Collector) -> AsyncIterator[Device]:
    async with running(tmp_path, tracing=TracingConfig(endpoint=collector.url)) as device:
        yield device


async def spans(device: Device, collector: Collector) -> list[Span]:
    """Flush the daemon's spans and return what the collector received.

    A request's span ends after its answer has left, so the client may be here first.
    """
    await until(lambda: device.app.in_flight == 0)
    assert device.parts.tracing is not None
    await asyncio.to_thread(device.parts.tracing.close)
    return collector.spans


async def test_a_request_is_a_span_with_its_attempts(device: Device, collector: Collector) -> None:
    """A fallback: the first attempt has its error, the second succeeds."""
    device.engine.fault = "refuse"
    answer = await device.ask("my secret", temperature=0.5, max_tokens=9)
    by_name = {span.name: span for span in await spans(device, collector)}
    request, first, second = by_name["chat auto"], by_name["attempt small"], by_name["attempt large"]
    assert {span.service for span in by_name.values()} == {"causeway-edge"}
    assert (request.kind, first.kind, second.kind) == (SERVER, INTERNAL, CLIENT)
    assert request.parent == ""
    assert first.parent == second.parent == request.id
    assert request.attributes["causeway.decision"] == answer.headers["x-causeway-decision"]
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.request.max_tokens"] == 9
    assert request.attributes["gen_ai.response.model"] == "m-large"
    assert request.attributes["causeway.degraded"] is True
    assert first.error == first.attributes["error.type"] == "engine_unavailable"
    assert (second.error, second.events) == ("", ("first token",))
    assert request.begin <= first.begin <= first.end <= second.begin <= second.end <= request.end
    assert "secret" not in repr(by_name)


async def test_the_cloud_gets_the_attempt_as_parent_span(device: Device, collector: Collector) -> None:
    """The trace id is the client's."""
    answer = await device.ask(tags="cloud", headers={"traceparent": CALLER})
    assert answer.status == 200
    by_name = {span.name: span for span in await spans(device, collector)}
    headers = device.cloud.request_headers[-1]
    assert by_name["chat auto"].parent == "b7ad6b7169203331"
    assert headers["traceparent"] == f"00-0af7651916cd43dd8448eb211c80319c-{by_name['attempt large'].id}-01"
    assert headers["x-causeway-policy"] == answer.headers["x-causeway-policy"]


async def test_a_request_bound_to_the_device_has_no_spans(device: Device, collector: Collector) -> None:
    assert (await device.ask(tags="private")).status == 200
    assert (await device.ask(headers={"x-causeway-prefer": "only_on_device"})).status == 200
    assert (await device.ask("another")).status == 200
    assert len([span for span in await spans(device, collector) if span.kind == SERVER]) == 1


async def test_a_bound_request_that_is_refused_before_its_decision_has_no_spans(
    device: Device, collector: Collector
) -> None:
    """One that may leave the device has its span."""
    device.parts.admission.drain()
    assert (await device.ask(tags="private")).status == 503
    refused = await device.ask("another")
    assert refused.status == 503
    (span,) = await spans(device, collector)
    assert span.attributes["causeway.decision"] == refused.headers["x-causeway-decision"]


async def test_a_shared_generation_is_linked(device: Device, collector: Collector) -> None:
    """Of two identical requests one has the attempt, the other a link to it."""
    device.engine.gate = asyncio.Event()
    tasks = [asyncio.ensure_future(device.ask("same", temperature=0.0)) for _ in range(2)]
    await until(lambda: device.engine.running == 1)
    device.engine.gate.set()
    answers = await asyncio.gather(*tasks)
    assert sorted(answer.headers["x-causeway-cache"] for answer in answers) in (["coalesced", "miss"], ["hit", "miss"])
    found = await spans(device, collector)
    requests = [span for span in found if span.kind == SERVER]
    assert len([span for span in found if span.kind == INTERNAL]) == 1
    linked = [span for span in requests if span.attributes["causeway.cache"] == "coalesced"]
    assert all(span.links == (next(one.id for one in requests if one is not span),) for span in linked)


async def test_an_unsampled_trace_context_is_respected(device: Device, collector: Collector) -> None:
    """No spans are sent, and the cloud receives the unsampled flag."""
    await device.ask(tags="cloud", headers={"traceparent": f"{CALLER[:-2]}00"})
    assert await spans(device, collector) == []
    assert device.cloud.request_headers[-1]["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert device.cloud.request_headers[-1]["traceparent"].endswith("-00")


@pytest.mark.slow
async def test_requests_are_answered_while_the_collector_is_unreachable(tmp_path: Path) -> None:
    """And the daemon still stops."""
    async with running(tmp_path, tracing=TracingConfig(endpoint="http://127.0.0.1:1")) as device:
        assert (await device.ask()).status == 200


async def test_a_cancelled_request_has_its_span(device: Device, collector: Collector) -> None:
    """The running attempt is marked as cancelled too."""
    device.engine.gate = asyncio.Event()
    task = asyncio.ensure_future(device.ask(stream=True))
    await until(lambda: device.engine.running == 1)
    task.cancel()
    await until(lambda: len(device.parts.decisions.memory))
    by_name = {span.name: span for span in await spans(device, collector)}
    assert by_name["chat auto"].attributes["error.type"] == "client_gone"
    assert by_name["attempt small"].attributes["error.type"] == "client_gone"
