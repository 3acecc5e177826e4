"""A chat that memory has an answer to, in callbacks: the same bytes and the same record as from the general path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.serving.direct_hits import DirectHits

from ..device import POLICY, Answer, Device, running
from .test_answers import older_than
from .test_direct import client, stripped
from .test_direct_streams import assert_alike

ASKED: dict[str, Any] = {"temperature": 0}
CASES: Mapping[str, dict[str, Any]] = {
    "whole": {},
    "of another seed": {"seed": 7},
    "streamed": {"stream": True},
    "streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "of a tag": {"tags": "private"},
}


class Watched(DirectHits):
    """Counts the answers. `is_off`: every request takes the general path."""

    answered, is_off = 0, False

    @classmethod
    def of(cls, device: Device) -> Watched:
        watched = device.app.api.hits = cls(device.parts.service)
        return watched

    def answer(self, *request: Any) -> bool:
        is_answered = not self.is_off and super().answer(*request)
        self.answered += is_answered
        return is_answered


async def twins(device: Device, **body: Any) -> tuple[Answer, Answer]:
    """Return the answers of the cache to the same request on the general path, and in callbacks."""
    watched, answers = Watched.of(device), []
    first = await device.ask(**ASKED, **body)
    assert first.headers["x-causeway-cache"] == "miss"
    for watched.is_off in (True, False):
        answers.append(await device.ask(**ASKED, **body))
    assert watched.answered == 1
    return answers[0], answers[1]


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
async def test_a_hit_and_its_record_are_those_of_the_general_path(device: Device, body: dict[str, Any]) -> None:
    general, direct = await twins(device, **body)
    record = await assert_alike(device, general, direct)
    assert (direct.headers["x-causeway-cache"], record.outcome.cache) == ("hit", "hit")
    assert record.outcome.cache_age_s is not None
    device.assert_nothing_leaks()


async def test_what_memory_does_not_have_fresh_is_looked_for_elsewhere(device: Device) -> None:
    watched = Watched.of(device)
    bodies: tuple[dict[str, Any], ...] = ({**ASKED, "tags": "stale"}, {"temperature": 0.7})
    for body in bodies:
        for _ in range(2):
            assert (await device.ask(**body)).headers["x-causeway-cache"] in ("miss", "bypass")
            await older_than(0.001)
    assert watched.answered == 0
    device.assert_nothing_leaks()


async def test_a_rate_holds_for_hits(tmp_path: Path) -> None:
    policy = POLICY.replace("queue: 4}", "queue: 4, per_client_rps: 0.001}")
    async with running(tmp_path, policy=policy) as device:
        Watched.of(device)
        first, second = await device.ask(**ASKED), await device.ask(**ASKED)
        assert (first.status, second.status) == (200, 429)
        assert second.json["error"]["code"] == "rate_limit_exceeded"


async def test_many_requests_that_were_sent_ahead_are_answered_in_order(device: Device) -> None:
    """Each answer begins the next request."""
    watched = Watched.of(device)
    texts = [f"question {number}" for number in range(3)]
    for text in texts:
        await device.ask(text, **ASKED)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", device.app.port)
    for number in range(900):
        document = {"model": "auto", "messages": [{"role": "user", "content": texts[number % 3]}], **ASKED}
        body = json.dumps(document).encode()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    created = []
    for _ in range(900):
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length: ")[2].partition("\r\n")[0])
        created.append(json.loads(await reader.readexactly(length)))
    writer.close()
    assert watched.answered == 900
    assert len({one["id"] for one in created}) == 900
    device.assert_nothing_leaks()


async def test_a_client_that_reads_no_answers_holds_no_more_of_them(device: Device) -> None:
    watched = Watched.of(device)
    part = "word " * 20_000
    device.cloud.words = (part, part, part)
    await device.ask(tags="cloud", **ASKED)
    document = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], **ASKED}
    body = json.dumps(document).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", device.app.port, limit=1)
    for _ in range(300):
        writer.write(f"{head}x-causeway-tags: cloud\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(2000):
        await asyncio.sleep(0)
    assert 0 < watched.answered < 200
    writer.transport.abort()


async def test_a_daemon_that_ends_refuses(tmp_path: Path) -> None:
    async with running(tmp_path, server=ServerConfig(port=0, drain_s=0.05)) as device:
        Watched.of(device)
        async with client(device) as asking:
            await asking.ask(**ASKED)
            device.parts.admission.drain()
            assert (await asking.ask(**ASKED)).status == 503


async def test_metrics_count_a_hit_once(device: Device) -> None:
    general, direct = await twins(device)
    records = [stripped(msgspec.to_builtins(await device.record(one))) for one in (general, direct)]
    assert records[0] == records[1]
    lines = device.parts.metrics.text().decode().splitlines()
    assert 'causeway_edge_requests_total{cache="hit",route="cache",status="ok",target="small"} 2.0' in lines
