"""Responses in the background of a device: jobs, whose events a client follows from any number on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.cloud_pool.jobs.conftest import until

from ..device import POLICY
from ..jobs.support import PROMPT
from .support import client_of, conversation_of, storing

pytestmark = pytest.mark.slow
ANSWER = "edge says so"
ENDED = ("completed", "incomplete", "failed", "cancelled")


async def ended(client: openai.AsyncOpenAI, name: str) -> Response:
    async with asyncio.timeout(30):
        async with await client.responses.retrieve(name, stream=True) as events:
            async for _ in events:
                pass
    read = await client.responses.retrieve(name)
    assert read.status in ENDED
    return read


async def up_to(stream: Any, delta: str, *, close: bool = True) -> list[dict[str, Any]]:
    """Read events up to the one with this piece of text."""
    events = []
    async with asyncio.timeout(30):
        async for event in stream:
            events.append(event.to_dict())
            if events[-1].get("delta") == delta:
                break
    if close:
        await stream.close()
    return events


async def test_a_response_is_made_in_the_background_and_continued(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        device.engine.gate = asyncio.Event()
        made = await client.responses.create(model="auto", input="one", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model="auto", input="two", previous_response_id=made.id)
        device.engine.gate.set()
        read = await ended(client, made.id)
        assert (read.id, read.status, read.output_text, read.background) == (made.id, "completed", ANSWER, True)
        await client.responses.create(model="auto", input="two", previous_response_id=made.id)
        assert conversation_of(device) == [("user", "one"), ("assistant", ANSWER), ("user", "two")]
        reference: Any = [{"type": "item_reference", "id": read.output[0].id}]
        await client.responses.create(model="auto", input=reference)


async def test_events_are_numbered_and_go_on_after_any_of_them(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        device.engine.gate = asyncio.Event()
        name, first = "", []
        stream = await client.responses.create(model="auto", input="one", background=True, stream=True)
        async for event in stream:
            first.append(event.to_dict())
            name = name or event.response.id  # type: ignore[union-attr]
            if len(first) == 2:
                break  # the client leaves, the response is made
        await stream.close()
        device.engine.gate.set()
        rest = [event.to_dict() async for event in await client.responses.retrieve(name, stream=True, starting_after=1)]
        whole = [event.to_dict() async for event in await client.responses.retrieve(name, stream=True)]
        assert first + rest == whole
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[-1]["type"] == "response.completed"
        for after in range(len(whole)):
            again = await client.responses.retrieve(name, stream=True, starting_after=after)
            assert [event.to_dict() async for event in again] == whole[after + 1 :]


async def test_text_arrives_while_it_is_made_and_another_connection_goes_on(tmp_path: Path) -> None:
    """What one connection had and what the next one has add up, also to the failure that ends it."""
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        device.engine.pause_after = 2
        stream = await client.responses.create(model="auto", input="one", background=True, stream=True)
        first = await up_to(stream, "edge ")
        name = str(first[0]["response"]["id"])
        assert (await client.responses.retrieve(name)).status == "in_progress"
        number = first[-1]["sequence_number"]
        rest = await up_to(await client.responses.retrieve(name, stream=True, starting_after=number), "says ")
        assert [event["sequence_number"] for event in first + rest] == list(range(len(first + rest)))
        follower = await client.responses.retrieve(name, stream=True, starting_after=number)
        again = await up_to(follower, "says ", close=False)
        await client.responses.cancel(name)
        again += [event.to_dict() async for event in follower]
        assert again[:-1] == rest
        assert (again[-1]["type"], again[-1]["sequence_number"]) == ("response.failed", number + len(again))


async def test_a_follower_is_told_if_another_run_begins_again(tmp_path: Path) -> None:
    body, events = {"model": "small", "input": "one", "background": True, "stream": True}, list[dict[str, Any]]()
    async with storing(tmp_path, jobs=PROMPT) as (device, _):
        device.engine.pause_after = 2
        async with device.session.post("/v1/responses", json=body, headers={"Authorization": "Bearer kiosk"}) as reply:
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                events.append(json.loads(line[6:]))
                if events[-1].get("delta") == "says ":
                    feed = (await device.parts.jobs.open()).runner.feed
                    feed.start(1, 2).append("now other ")  # the second run of the first job
    assert "begins again" in events[-1]["error"]["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_an_answer_that_nobody_asked_for_outlives_its_job(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        made = await client.responses.create(model="auto", input="one", background=True)
        store = device.parts.response_store

        async def is_settled() -> bool:
            return b"pending" not in (await store.read("kiosk", [made.id]))[0]

        await until(is_settled)
        jobs: Any = await client.get("/jobs", cast_to=object)
        await client.post(f"/jobs/{jobs['data'][0]['id']}/purge", cast_to=object)
        read = await client.responses.retrieve(made.id)
        assert (read.status, read.output_text) == ("completed", ANSWER)


async def test_a_response_is_cancelled(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        device.engine.gate = asyncio.Event()
        made = await client.responses.create(model="auto", input="one", background=True)
        await device.engine.entered.wait()
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        whole = [event.type async for event in await client.responses.retrieve(made.id, stream=True)]
        assert whole[-1] == "response.failed"
        device.engine.gate = None
        plain = await client.responses.create(model="auto", input="one", store=True)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(plain.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.retrieve(plain.id, stream=True)


async def test_a_response_that_fails_tells_why(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        device.engine.fault = "corrupt"
        made = await client.responses.create(model="small", input="one", background=True)
        failed = await ended(client, made.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.message


async def test_a_response_tells_the_temperature_that_was_used(tmp_path: Path) -> None:
    policy = POLICY.replace("model: m-small", "model: m-small\n    temperature: 0.25")
    async with storing(tmp_path, policy=policy, jobs=PROMPT) as (_, client):
        made = await client.responses.create(model="small", input="one")
        chosen = await client.responses.create(model="small", input="one", temperature=0.5)
        later = await client.responses.create(model="small", input="one", background=True)
        later = await ended(client, later.id)
        assert [one.temperature for one in (made, chosen, later)] == [0.25, 0.5, 0.25]


async def test_the_same_key_is_the_same_response(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        key: Any = {"Idempotency-Key": "k"}
        made = await client.responses.create(model="auto", input="one", background=True, extra_headers=key)
        await ended(client, made.id)
        again = await client.responses.create(model="auto", input="one", background=True, extra_headers=key)
        assert (again.id, again.status) == (made.id, "completed")
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model="auto", input="two", background=True, extra_headers=key)
        assert (await client.responses.retrieve(made.id)).output_text == ANSWER
        assert len(device.engine.calls) == 1


async def test_a_deleted_response_is_not_made(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client), client_of(device, "till") as other:
        device.engine.gate = asyncio.Event()
        made = await client.responses.create(model="auto", input="one", background=True)
        with pytest.raises(openai.NotFoundError):
            await other.responses.cancel(made.id)
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        jobs = (await device.session.get("/v1/jobs", headers={"Authorization": "Bearer kiosk"})).json()
        assert [job["status"] for job in (await jobs)["data"]] == ["cancelled"]


async def test_a_response_is_made_after_a_restart(tmp_path: Path) -> None:
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        device.engine.gate = asyncio.Event()
        made = await client.responses.create(model="auto", input="one", background=True)
        await device.engine.entered.wait()
    async with storing(tmp_path, jobs=PROMPT) as (device, client):
        assert (await ended(client, made.id)).output_text == ANSWER
        assert len(device.engine.calls) == 1
