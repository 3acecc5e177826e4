"""The daemon's traces, as a collector gets them: a span a request, one an attempt, nothing of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edge_node.config.schema import TracingConfig
from tests.edge.box import Box, running
from tests.edge.scripted import until

from .collector import Collector, Span

SERVER, CLIENT, INTERNAL = 2, 3, 1
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = await Collector().start()
    yield found
    await found.stop()


@pytest.fixture
async def box(tmp_path: Path, collector: Collector) -> AsyncIterator[Box]:
    async with running(tmp_path, tracing=TracingConfig(endpoint=collector.url)) as box:
        yield box


async def spans(box: Box, collector: Collector) -> list[Span]:
    """What there is once the daemon has sent all of it."""
    assert box.parts.tracing is not None
    await asyncio.to_thread(box.parts.tracing.close)
    return collector.spans


async def test_a_request_is_a_span_with_its_attempts(box: Box, collector: Collector) -> None:
    """A fallback: the first attempt's fault, the second's success, the whole with what it cost and why."""
    box.engine.fault = "refuse"
    answer = await box.ask("my secret", temperature=0.5, max_tokens=9)
    found = {span.name: span for span in await spans(box, collector)}
    whole, first, second = found["chat auto"], found["attempt small"], found["attempt large"]
    assert {span.service for span in found.values()} == {"causeway-edge"}
    assert (whole.kind, first.kind, second.kind) == (SERVER, INTERNAL, CLIENT)
    assert whole.parent == ""
    assert first.parent == second.parent == whole.id
    assert whole.attributes["causeway.decision"] == answer.headers["x-causeway-decision"]
    assert whole.attributes["gen_ai.operation.name"] == "chat"
    assert whole.attributes["gen_ai.request.max_tokens"] == 9
    assert whole.attributes["gen_ai.response.model"] == "m-large"
    assert whole.attributes["causeway.degraded"] is True
    assert first.error == first.attributes["error.type"] == "engine_unavailable"
    assert (second.error, second.events) == ("", ("first token",))
    assert whole.begin <= first.begin <= first.end <= second.begin <= second.end <= whole.end
    assert "secret" not in repr(found)


async def test_the_cloud_hangs_its_spans_on_the_attempt(box: Box, collector: Collector) -> None:
    """The caller's trace goes on through us: its id, and our attempt as the parent; the policy's name beside it."""
    answer = await box.ask(tags="cloud", headers={"traceparent": CALLER})
    assert answer.status == 200
    found = {span.name: span for span in await spans(box, collector)}
    asked = box.cloud.asked[-1]
    assert found["chat auto"].parent == "b7ad6b7169203331"
    assert asked["traceparent"] == f"00-0af7651916cd43dd8448eb211c80319c-{found['attempt large'].id}-01"
    assert asked["x-causeway-policy"] == answer.headers["x-causeway-policy"]


async def test_what_is_bound_to_the_device_leaves_no_trace(box: Box, collector: Collector) -> None:
    """Not even that it was."""
    assert (await box.ask(tags="private")).status == 200
    assert (await box.ask(headers={"x-causeway-prefer": "only_on_device"})).status == 200
    assert (await box.ask("another")).status == 200
    assert len([span for span in await spans(box, collector) if span.kind == SERVER]) == 1


async def test_who_shares_an_answer_points_to_whose_it_was(box: Box, collector: Collector) -> None:
    """Two ask the same at once: one has the attempt, the other a link to it."""
    box.engine.gate = asyncio.Event()
    asking = [asyncio.ensure_future(box.ask("same", temperature=0.0)) for _ in range(2)]
    await until(lambda: box.engine.running == 1)
    box.engine.gate.set()
    answers = await asyncio.gather(*asking)
    assert sorted(answer.headers["x-causeway-cache"] for answer in answers) in (["coalesced", "miss"], ["hit", "miss"])
    found = await spans(box, collector)
    wholes = [span for span in found if span.kind == SERVER]
    assert len([span for span in found if span.kind == INTERNAL]) == 1
    linked = [span for span in wholes if span.attributes["causeway.cache"] == "coalesced"]
    assert all(span.links == (next(one.id for one in wholes if one is not span),) for span in linked)


async def test_a_caller_that_does_not_sample_is_followed(box: Box, collector: Collector) -> None:
    """Nothing is sent, and the cloud is told that nothing is."""
    await box.ask(tags="cloud", headers={"traceparent": f"{CALLER[:-2]}00"})
    assert await spans(box, collector) == []
    assert box.cloud.asked[-1]["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert box.cloud.asked[-1]["traceparent"].endswith("-00")


async def test_a_collector_that_is_away_costs_no_answer(tmp_path: Path) -> None:
    """Nobody listens there: requests are answered, and the daemon ends."""
    async with running(tmp_path, tracing=TracingConfig(endpoint="http://127.0.0.1:1")) as box:
        assert (await box.ask()).status == 200


async def test_a_client_that_leaves_has_its_span(box: Box, collector: Collector) -> None:
    """Cancelled: the attempt under way says so."""
    box.engine.gate = asyncio.Event()
    asking = asyncio.ensure_future(box.ask(stream=True))
    await until(lambda: box.engine.running == 1)
    asking.cancel()
    await until(lambda: box.parts.decisions._memory)
    found = {span.name: span for span in await spans(box, collector)}
    assert found["chat auto"].attributes["error.type"] == "client_gone"
    assert found["attempt small"].attributes["error.type"] == "client_gone"
