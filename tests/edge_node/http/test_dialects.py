"""What OpenAI-compatible servers really send: the answer is kept, the breaker stays closed, and one POST has run.

Each case is what a server of the field answers; what it is read as stands beside it. `DEVICE` would be the answer of
the device, which comes where the cloud's is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from causeway_server.edge_node.config.schema import ServerConfig
from tests.dialects import (
    ERRORS,
    HI,
    OSLO,
    REASON,
    REFUSALS,
    STREAMS,
    TOOLS,
    UNREADABLE,
    UNREADABLE_STREAMS,
    WHOLES,
    Read,
    read_of,
)

from ..device import Answer, Device, running
from ..raw_upstream import RawUpstream, call, delta, document, events, whole
from ..scripted import CLOUD_WORDS, EDGE_WORDS, ScriptedCloud

EDGE, CLOUD = "".join(EDGE_WORDS), "".join(CLOUD_WORDS)
ONLY_CLOUD = {"x-causeway-prefer": "only_cloud"}


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path, cloud=RawUpstream()) as device:
        yield device


async def ask(device: Device, upstream: bytes, *, stream: bool, headers: Mapping[str, str] = {}) -> Answer:
    assert isinstance(device.cloud, RawUpstream)
    device.cloud.replies = [upstream]
    return await device.ask(tags="cloud", headers=headers, stream=stream, tools=TOOLS)


async def assert_read(device: Device, answer: Answer, expected: Read) -> None:
    assert (answer.status, answer.headers["x-causeway-route"]) == (200, "cloud"), answer.body
    assert read_of(answer, expected.note) == expected
    assert len(device.cloud.bodies) == 1
    assert device.parts.clouds.first is not None
    assert device.parts.clouds.first.signals().breaker == "closed"
    record = await device.record(answer)
    assert expected.note in record.outcome.attempts[0].detail


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_is_read_as_it_was_meant(device: Device, name: str) -> None:
    upstream, expected = STREAMS[name]
    await assert_read(device, await ask(device, upstream, stream=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLES)
async def test_a_whole_answer_is_read_as_it_was_meant(device: Device, name: str) -> None:
    upstream, expected = WHOLES[name]
    await assert_read(device, await ask(device, upstream, stream=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refusal_has_its_status_and_runs_once(device: Device, status: str, stream: bool, error: str) -> None:
    """The vendor's reason reaches the client where it is about the request, and stays out where it is about a key."""
    expected_status, code, has_reason = REFUSALS[status]
    upstream = document(ERRORS[error], status=status)
    answer = await ask(device, upstream, stream=stream, headers=ONLY_CLOUD)
    assert (answer.status, answer.code) == (expected_status, code)
    assert (REASON in answer.message) is has_reason
    assert "the prompt" not in answer.message
    assert (answer.headers.get("x-should-retry") == "false") is (code == "cloud_rejected")
    assert len(device.cloud.bodies) == 1


@pytest.mark.parametrize("status", [status for status in REFUSALS if not status.startswith("400")])
async def test_the_policys_next_attempt_comes_first(device: Device, status: str) -> None:
    answer = await ask(device, document(ERRORS["openai"], status=status), stream=False)
    assert (answer.status, answer.text) == (200, EDGE)
    assert len(device.cloud.bodies) == 1


@pytest.mark.parametrize(
    ("upstream", "stream"),
    [*((value, False) for value in UNREADABLE.values()), *((value, True) for value in UNREADABLE_STREAMS.values())],
    ids=[*UNREADABLE, *(f"{name}, streamed" for name in UNREADABLE_STREAMS)],
)
async def test_an_answer_that_cannot_be_read_is_not_the_targets_outage(
    device: Device, upstream: bytes, stream: bool
) -> None:
    """However often: another client's request is sent, and answered."""
    for _ in range(6):
        answer = await ask(device, upstream, stream=stream, headers=ONLY_CLOUD)
        assert (answer.status, answer.code) == (502, "all_attempts_failed")
    assert (await ask(device, document(whole()), stream=False)).headers["x-causeway-route"] == "cloud"
    assert len(device.cloud.bodies) == 7


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Content"])
@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "Unknown field: stream_options", "param": None}},
        {"error": {"message": "no", "param": "stream_options"}},
        {"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs are not permitted"}]},
    ],
)
async def test_a_server_without_stream_options_is_asked_again_once(
    device: Device, status: str, error: dict[str, object]
) -> None:
    assert isinstance(device.cloud, RawUpstream)
    device.cloud.replies = [document(error, status=status), events(*HI)]
    for _ in range(2):
        answer = await device.ask(tags="cloud", stream=True, stream_options={"include_usage": True})
        assert (answer.status, answer.text, answer.headers["x-causeway-route"]) == (200, "hi", "cloud")
        assert answer.events[-1]["usage"]["completion_tokens"] == 2
    assert ["stream_options" in body for body in device.cloud.bodies] == [True, False, False]


async def test_a_connection_that_closes_without_an_answer_is_one_post_and_a_502(device: Device) -> None:
    answer = await ask(device, b"", stream=False, headers=ONLY_CLOUD)
    assert (answer.status, answer.code) == (502, "all_attempts_failed")
    assert len(device.cloud.bodies) == 1


# --- fields that we do not interpret ----------------------------------------------------------------------------------

SIGNATURE = {"google": {"thought_signature": "c2lnbmF0dXJl"}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_unknown_fields_of_an_answer_reach_the_client(device: Device, stream: bool) -> None:
    calls = [{**call("weather", OSLO, index=0, id="a"), "extra_content": SIGNATURE}]
    details = {"reasoning_details": [{"type": "x", "data": "y"}]}
    upstream = (
        events(delta(tool_calls=calls, **details), delta(finish="tool_calls"))
        if stream
        else document(whole(None, "tool_calls", tool_calls=calls, **details))
    )
    answer = await ask(device, upstream, stream=stream)
    messages = (
        [c["delta"] for e in answer.events for c in e["choices"]]
        if stream
        else [c["message"] for c in answer.json["choices"]]
    )
    found = next(message for message in messages if message.get("tool_calls"))
    assert found["reasoning_details"] == details["reasoning_details"]
    assert found["tool_calls"][0]["extra_content"] == SIGNATURE
    assert found["tool_calls"][0]["function"]["arguments"] == OSLO


async def test_unknown_fields_of_a_request_reach_the_target_with_what_they_belong_to(device: Device) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s", **mark}], **mark},
        {"role": "user", "content": [{"type": "text", "text": "hello", **mark}, {"type": "text", "text": "there"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{**call("weather", OSLO, id="a"), "extra_content": SIGNATURE}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold", **mark},
    ]
    tool = {**TOOLS[0], **mark, "function": {**TOOLS[0]["function"], "cache": 1}}  # type: ignore[dict-item]
    assert isinstance(device.cloud, RawUpstream)
    device.cloud.replies = [document(whole())]
    await device.ask(tags="cloud", messages=messages, tools=[tool])
    (sent,) = device.cloud.bodies
    assert sent["tools"] == [tool]
    assert sent["messages"] == messages


async def test_requests_that_differ_in_an_unknown_field_share_no_cached_answer(device: Device) -> None:
    assert isinstance(device.cloud, RawUpstream)
    device.cloud.replies = [document(whole())]
    for effort in ("low", "high", "high"):
        await device.ask(
            tags="cloud", temperature=0, messages=[{"role": "user", "content": "hello", "x_effort": effort}]
        )
    assert len(device.cloud.bodies) == 2


# --- silence ----------------------------------------------------------------------------------------------------------


async def test_a_silent_stream_gets_comments_where_the_owner_wants_them(tmp_path: Path) -> None:
    cloud = ScriptedCloud()
    cloud.gate = asyncio.Event()
    server = ServerConfig(port=0, drain_s=1.0, default_deadline_s=60.0, heartbeat_s=0.02)
    async with running(tmp_path, cloud=cloud, server=server) as device:
        body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        headers = {"x-causeway-tags": "cloud"}
        async with device.session.post("/v1/chat/completions", json=body, headers=headers) as response:
            assert (response.status, response.headers["Content-Type"][:17]) == (200, "text/event-stream")
            assert await response.content.readexactly(4) == b": \n\n"
            assert await response.content.readexactly(4) == b": \n\n"
            cloud.gate.set()
            rest = await response.content.read()
        answer = Answer(200, dict(response.headers), rest.replace(b": \n\n", b""))
        assert (answer.text, answer.done) == (CLOUD, True)
        cloud.gate, cloud.status = asyncio.Event(), 500
        async with device.session.post(
            "/v1/chat/completions", json=body, headers={**headers, "x-causeway-prefer": "only_cloud"}
        ) as response:
            assert await response.content.readexactly(4) == b": \n\n"
            cloud.gate.set()
            rest = await response.content.read()
        assert b"all_attempts_failed" in rest
        assert b"[DONE]" not in rest
        quick = await device.ask(tags="edge", stream=True)
        assert (quick.text, quick.headers["x-causeway-route"]) == (EDGE, "edge")
