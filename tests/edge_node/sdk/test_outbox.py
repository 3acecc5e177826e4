"""The SDK's outbox: what an application submitted becomes one job each, whatever ends in between."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from aiohttp import web

from causeway_sdk import (
    AsyncCauseway,
    AsyncOutbox,
    Causeway,
    CausewayAPIError,
    CausewayTimeout,
    Job,
    Outbox,
    OutboxError,
)
from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from tests.edge_node.device import running
from tests.ports import free_port

from .device import answer_with, raw
from .device import running as running_device


async def ended(outbox: AsyncOutbox) -> dict[str, Job]:
    return {key: job async for key, job in outbox.results(timeout_s=60)}


def queued(request_id: str = "job_1") -> web.Response:
    return web.json_response({"id": request_id, "status": "queued"}, status=202)


@pytest.mark.slow
async def test_what_was_submitted_while_no_daemon_was_there_is_answered_once(tmp_path: Path) -> None:
    port = free_port()
    async with AsyncCauseway(f"http://127.0.0.1:{port}") as causeway:
        async with AsyncOutbox(tmp_path / "outbox", causeway) as outbox:
            first = outbox.submit("hello", priority="interactive", deadline_s=3600, tags=["edge"])
            assert outbox.submit("hello", key=first) == first
            second = outbox.submit([{"role": "user", "content": "hello again"}], tags=["edge"])
            wrong = outbox.submit("hello", model="nobody")
            assert await outbox.send() == 3
        assert stat.S_IMODE((tmp_path / "outbox").stat().st_mode) == 0o600
        async with running(tmp_path, server=ServerConfig(port=port)) as device:
            async with AsyncOutbox(tmp_path / "outbox", causeway) as outbox:  # as after a restart of the application
                assert await outbox.send() == 0
                found = await ended(outbox)
                assert await ended(outbox) == {}
            assert len(device.engine.calls) == 2
    assert found.keys() == {first, second, wrong}
    assert [found[key].status for key in (first, second, wrong)] == ["succeeded", "succeeded", "failed"]
    assert found[wrong].code == "model_not_found"
    answer = found[first].answer
    assert answer is not None
    assert answer.text == "edge says so"


async def test_a_try_whose_answer_is_lost_is_repeated_with_the_same_body(tmp_path: Path) -> None:
    """The time left is not computed again, because the device compares the bodies of one key."""
    now = 1000.0

    async def lose(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return queued()

    async with running_device() as device, AsyncCauseway(device.url) as causeway:
        device.handler = lose
        async with AsyncOutbox(tmp_path / "outbox", causeway, clock=lambda: now) as outbox:
            outbox.submit("hello", deadline_s=60)
            assert await outbox.send() == 1
            now += 5.0
            device.handler = answer_with({"id": "job_1", "status": "queued"})
            assert await outbox.send() == 0
            assert device.requests[0] == device.requests[1]
            assert device.requests[0]["deadline_ms"] == 60_000
            assert len({headers["idempotency-key"] for headers in device.headers}) == 1


async def test_two_sends_at_once_send_the_same_body(tmp_path: Path) -> None:
    """A device refuses another body under the same key, which would lose the job that it has."""
    now = 1000.0
    async with running_device() as device, AsyncCauseway(device.url) as causeway:
        first_sent, both_sent = asyncio.Event(), asyncio.Event()

        async def hold(request: web.Request) -> web.Response:
            nonlocal now
            now += 1.0
            if first_sent.is_set():
                both_sent.set()
            first_sent.set()
            await both_sent.wait()
            return queued()

        device.handler = hold
        async with AsyncOutbox(tmp_path / "outbox", causeway, clock=lambda: now) as outbox:
            keys = [outbox.submit("hello", deadline_s=60), outbox.submit("hello", deadline_s=60)]
            assert await asyncio.gather(outbox.send(), outbox.send()) == [0, 0]
        sent = {key: [] for key in keys}
        for body, headers in zip(device.requests, device.headers, strict=True):
            sent[headers["idempotency-key"]].append(body["deadline_ms"])
        assert [len(set(bodies)) for bodies in sent.values()] == [1, 1]


async def test_a_portal_on_the_way_takes_no_submission(tmp_path: Path) -> None:
    """Its page is neither a job nor the end of one."""
    async with (
        running_device() as device,
        AsyncCauseway(device.url) as causeway,
        AsyncOutbox(tmp_path / "outbox", causeway) as outbox,
    ):
        outbox.submit("hello", key="k")
        device.handler = raw(b"<html>Log in</html>", 200)
        assert await outbox.send() == 1
        device.handler = answer_with({"id": "job_1", "status": "queued"})
        assert await outbox.send() == 0
        device.handler = raw(b"<html>Not found</html>", 404)
        with pytest.raises(CausewayTimeout):
            await anext(outbox.results(timeout_s=0))
        device.handler = answer_with({"id": "job_1", "status": "succeeded"})
        assert (await ended(outbox))["k"].status == "succeeded"


async def test_a_deadline_counts_from_the_submission(tmp_path: Path) -> None:
    now = 1000.0
    async with (
        running_device() as device,
        AsyncCauseway(device.url) as causeway,
        AsyncCauseway("http://127.0.0.1:9") as away,
    ):
        device.handler = answer_with({"id": "job_1", "status": "succeeded"})
        async with AsyncOutbox(tmp_path / "outbox", away, clock=lambda: now) as outbox:
            late, early = outbox.submit("hello", deadline_s=30), outbox.submit("hello", deadline_s=3600)
            assert await outbox.send() == 2
        now += 60.0
        async with AsyncOutbox(tmp_path / "outbox", causeway, clock=lambda: now) as outbox:
            found = await ended(outbox)
        assert {key: (job.status, job.code) for key, job in found.items()} == {
            late: ("expired", "deadline_exceeded"),
            early: ("succeeded", ""),
        }
        assert device.requests[0]["deadline_ms"] == 3_540_000


async def test_a_result_is_told_again_unless_the_next_one_was_asked_for(tmp_path: Path) -> None:
    async with running_device() as device, AsyncCauseway(device.url) as causeway:
        device.handler = answer_with({"id": "job_1", "status": "succeeded"})
        for _ in range(2):
            async with AsyncOutbox(tmp_path / "outbox", causeway) as outbox:
                outbox.submit("hello", key="k")
                async for key, _ in outbox.results(timeout_s=60):
                    assert key == "k"
                    break
        assert device.paths.count("POST /v1/jobs") == 1


@pytest.mark.slow
async def test_a_key_that_is_used_again_names_the_job_of_before(tmp_path: Path) -> None:
    """As long as the device keeps that: the same request is answered by it, another one ends with what to do."""
    async with running(tmp_path, server=ServerConfig(port=0)) as device:
        url = f"http://127.0.0.1:{device.app.port}"
        async with AsyncCauseway(url) as causeway, AsyncOutbox(tmp_path / "outbox", causeway) as outbox:
            for _ in range(2):
                outbox.submit("hello", key="k", tags=["edge"])
                assert (await ended(outbox))["k"].status == "succeeded"
            assert len(device.engine.calls) == 1
            outbox.submit("something else", key="k", tags=["edge"])
            other = (await ended(outbox))["k"]
            assert (other.status, other.code) == ("failed", "idempotency_conflict")
            assert "submitted with the key 'k' and another request or deadline: submit with a new key" in other.error
            assert len(device.engine.calls) == 1


async def test_a_wrong_key_is_the_applications_and_loses_nothing(tmp_path: Path) -> None:
    key = KeyConfig("app", "28b89c06c1596835df703240ddb92ecca8f9126844cb7bf13af5e91a6e400295")  # of kiosk-secret
    async with running(tmp_path, server=ServerConfig(port=0, keys=(key,))) as device:
        url = f"http://127.0.0.1:{device.app.port}"
        async with AsyncCauseway(url) as nobody, AsyncOutbox(tmp_path / "outbox", nobody) as outbox:
            outbox.submit("hello", tags=["edge"])
            with pytest.raises(CausewayAPIError, match="key"):
                await outbox.send()

        def collect() -> list[str]:
            with Causeway(url, api_key="kiosk-secret") as causeway, Outbox(tmp_path / "outbox", causeway) as outbox:
                return [job.status for _, job in outbox.results(timeout_s=60)]

        assert await asyncio.to_thread(collect) == ["succeeded"]


def test_a_full_or_broken_file_is_said(tmp_path: Path) -> None:
    with Causeway("http://127.0.0.1:9") as causeway:
        with Outbox(tmp_path / "outbox", causeway, max_jobs=1) as outbox:
            outbox.submit("hello", key="k")
            outbox.submit("hello", key="k")
            with pytest.raises(OutboxError, match="full: it holds 1"):
                outbox.submit("hello again")
        (tmp_path / "text").write_text("no database " * 100)
        for path, words in ((tmp_path / "text", "cannot be used"), (tmp_path / "none" / "outbox", "cannot be opened")):
            with pytest.raises(OutboxError, match=words):
                Outbox(path, causeway)
