"""What the official client does with the answers: create, stream, the tool runner, errors and models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool

from causeway_server.router.types import Chunk, FinishReason, ToolCallDelta, Usage
from tests.waiting import until

from .conftest import Surface, on_edge

HI: Any = [{"role": "user", "content": "hi"}]
USAGE = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=7, reasoning_tokens=2)
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
TIME: Any = {"name": "time", "input_schema": {"type": "object", "properties": {}}}


def played(*chunks: Chunk, reason: FinishReason = "stop", **end: Any) -> Sequence[Chunk]:
    return (*chunks, Chunk(finish_reason=reason, **end), Chunk(usage=USAGE))


def call(name: str, arguments: str, index: int = 0) -> Sequence[Chunk]:
    """A call whose arguments come in two pieces."""
    half = len(arguments) // 2
    begin = ToolCallDelta(index, arguments[:half], f"call_{index}_{name}", name)
    return Chunk(tool_calls=(begin,), tokens=1), Chunk(tool_calls=(ToolCallDelta(index, arguments[half:]),), tokens=1)


TEXT = played(Chunk("Good ", tokens=1), Chunk("day", tokens=1))
THOUGHT = played(
    *(Chunk(reasoning="Let me ", tokens=1), Chunk(reasoning="see.", tokens=1), Chunk("I ask.", tokens=1)),
    *call("weather", '{"city":"Oslo"}'),
    *call("time", "{}", 1),
    reason="tool_calls",
)


async def make(surface: Surface, *, stream: bool, **fields: Any) -> Any:
    """Return the Message that the client gets, whole or from the events of its stream helper."""
    body = {"model": surface.model, "max_tokens": 50, "messages": HI, **fields}
    if not stream:
        return await surface.client.messages.create(**body)
    async with surface.client.messages.stream(**body) as events:
        return await events.get_final_message()


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@both
async def test_a_text_is_a_message(surface: Surface, stream: bool) -> None:
    surface.played.answers = [TEXT]
    message = await make(surface, stream=stream, system="Be kind.")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.stop_reason, message.stop_sequence) == (
        *("message", "assistant", "end_turn"),
        None,
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Good day"}]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, 7, 0)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (4, 2)
    assert [(one.role, one.content) for one in surface.asked.messages] == [("system", "Be kind."), ("user", "hi")]


@both
async def test_a_thought_and_calls_are_blocks_in_order(surface: Surface, stream: bool) -> None:
    surface.played.answers = [THOUGHT]
    message = await make(surface, stream=stream, tools=[WEATHER, TIME])
    thinking, text, weather, time = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Let me see.", "I ask.")
    assert (weather.type, weather.name, weather.input, time.input) == ("tool_use", "weather", {"city": "Oslo"}, {})
    assert weather.id != time.id
    assert message.stop_reason == "tool_use"
    assert [tool.name for tool in surface.asked.tools] == ["weather", "time"]


@both
async def test_an_omitted_thought_has_its_block_without_the_text(surface: Surface, stream: bool) -> None:
    surface.played.answers = [THOUGHT]
    thinking = {"type": "adaptive", "display": "omitted"}
    message = await make(surface, stream=stream, tools=[WEATHER, TIME], thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == ""


@both
@pytest.mark.parametrize(
    ("reason", "more", "expected"),
    [("length", {}, "max_tokens"), ("content_filter", {}, "refusal"), ("stop", {"refusal": "No."}, "refusal")],
    ids=["length", "filter", "refusal"],
)
async def test_the_reason_of_the_stop(
    surface: Surface, stream: bool, reason: FinishReason, more: Any, expected: str
) -> None:
    surface.played.answers = [played(Chunk("So", tokens=1), Chunk(tokens=1, **more), reason=reason)]
    message = await make(surface, stream=stream)
    assert message.stop_reason == expected
    assert message.content[0].text == "So" + more.get("refusal", "")


@both
async def test_the_stop_sequence_is_named(surface: Surface, stream: bool) -> None:
    surface.played.answers = [played(Chunk("one", tokens=1), stop="END")]
    message = await make(surface, stream=stream, stop_sequences=["END", "FIN"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert surface.asked.stop == ("END", "FIN")


@both
async def test_an_answer_without_content_is_an_empty_message(surface: Surface, stream: bool) -> None:
    surface.played.answers = [played(Chunk(tokens=1))]
    message = await make(surface, stream=stream)
    assert (message.content, message.stop_reason) == ([], "end_turn")


async def test_arguments_that_are_no_object_reach_the_client_as_text(surface: Surface) -> None:
    surface.played.answers = [played(*call("weather", '{"city": '), reason="tool_calls")]
    message = await make(surface, stream=False, tools=[WEATHER])
    assert message.content[0].input == {"INVALID_JSON": '{"city": '}


async def test_the_events_come_in_the_documented_order(surface: Surface) -> None:
    """Including the names, which the client drops, and the ping."""
    surface.played.answers = [THOUGHT]
    answer = await surface.post(surface.body(stream=True, tools=[WEATHER, TIME]))
    names = [line.removeprefix("event: ") for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    begin, delta, stop = block
    assert names == [
        *("message_start", begin, "ping", delta, delta, stop),
        *(begin, delta, stop),
        *(begin, delta, delta, stop),
        *(begin, delta, delta, stop),
        *("message_delta", "message_stop"),
    ]
    assert "[DONE]" not in answer.body.decode()


async def test_the_helpers_events_build_the_text(surface: Surface) -> None:
    surface.played.answers = [TEXT]
    async with surface.client.messages.stream(model=surface.model, max_tokens=5, messages=HI) as stream:
        assert [text async for text in stream.text_stream] == ["Good ", "day"]
        assert stream.request_id == stream.response.headers["x-request-id"]


async def test_the_tool_runner_runs_a_tool_and_sends_its_result(surface: Surface) -> None:
    heard: list[str] = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        heard.append(city)
        return "snow"

    surface.played.answers = [played(*call("weather", '{"city":"Oslo"}'), reason="tool_calls"), TEXT]
    runner = surface.client.beta.messages.tool_runner(model=surface.model, max_tokens=50, messages=HI, tools=[weather])
    last = await runner.until_done()
    assert heard == ["Oslo"]
    assert [block.type for block in last.content] == ["text"]
    _, asked, result = surface.asked.messages
    assert (asked.tool_calls[0].name, asked.tool_calls[0].arguments) == ("weather", '{"city":"Oslo"}')
    assert (result.role, result.content, result.tool_call_id) == ("tool", "snow", asked.tool_calls[0].id)


async def test_the_tool_runner_tells_the_model_of_a_tool_that_failed(surface: Surface) -> None:
    @beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        raise RuntimeError(f"no {city}")

    surface.played.answers = [played(*call("weather", '{"city":"Oslo"}'), reason="tool_calls"), TEXT]
    runner = surface.client.beta.messages.tool_runner(model=surface.model, max_tokens=50, messages=HI, tools=[weather])
    await runner.until_done()
    content = surface.asked.messages[-1].content
    assert isinstance(content, str)
    assert content.startswith("Error: ")
    assert "no Oslo" in content


async def test_a_model_answers_in_the_form_that_is_asked_for(surface: Surface) -> None:
    surface.played.answers = [played(Chunk('{"city":"Oslo"}', tokens=1))]
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    await make(surface, stream=False, output_config=form)
    asked = surface.asked.response_format
    assert asked is not None
    assert (asked.kind, asked.strict) == ("json_schema", True)


@both
async def test_a_fault_before_the_answer_is_a_status(surface: Surface, stream: bool) -> None:
    surface.played.fault = surface.device.cloud.fault = "refuse"
    with pytest.raises(anthropic.APIStatusError) as failed:
        await make(surface, stream=stream)
    assert failed.value.status_code in (429, 503)
    assert failed.value.type in ("rate_limit_error", "api_error")
    assert failed.value.request_id == failed.value.response.headers["x-request-id"]
    assert failed.value.body["request_id"] == failed.value.request_id  # type: ignore[index]


async def test_a_fault_in_the_answer_is_an_event(surface: Surface) -> None:
    surface.played.fault = "die"
    with pytest.raises(anthropic.APIStatusError, match=r"'type': 'error'") as failed:
        await make(surface, stream=True)
    assert failed.value.type == "api_error"


async def test_after_a_fault_no_event_says_that_the_answer_is_whole(surface: Surface) -> None:
    surface.played.fault = "die"
    answer = await surface.post(surface.body(stream=True))
    assert b"event: error\n" in answer.body
    assert b"message_stop" not in answer.body


async def test_a_client_that_leaves_stops_the_model(surface: Surface) -> None:
    surface.played.pause_after = 1
    async with surface.client.messages.stream(model=surface.model, max_tokens=50, messages=HI) as stream:
        await anext(aiter(stream))
        await until(lambda: surface.played.paused)
    await until(lambda: surface.played.running == 0)


async def test_a_canceled_request_stops_the_model(surface: Surface) -> None:
    surface.played.gate = asyncio.Event()
    asking = asyncio.create_task(make(surface, stream=False))
    await surface.played.entered.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: surface.played.running == 0)


@on_edge
async def test_a_repeated_request_gets_the_stored_answer(surface: Surface) -> None:
    """As a Message, whole and streamed, also that of a chat."""
    surface.played.answers = [TEXT]
    first = await surface.device.ask("hi", temperature=0, max_tokens=50)
    assert first.headers["x-causeway-cache"] == "miss"
    for stream in (False, True):
        message = await make(surface, stream=stream, extra_body={"temperature": 0, "model": "auto"})
        assert (message.content[0].text, message.stop_reason) == ("Good day", "end_turn")
    assert len(surface.played.calls) == 1


async def test_models_are_listed_in_pages(surface: Surface) -> None:
    models = [model async for model in surface.client.models.list(limit=1)]
    assert surface.model in [model.id for model in models]
    assert all((model.type, model.lifecycle, model.display_name) == ("model", "active", model.id) for model in models)
    one = await surface.client.models.retrieve(surface.model)
    assert one == next(model for model in models if model.id == surface.model)
    last = await surface.client.models.list(before_id=models[-1].id, limit=1)
    assert [model.id for model in last.data] == [model.id for model in models[:-1]][-1:]
    with pytest.raises(anthropic.NotFoundError):
        await surface.client.models.retrieve("none")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after_id=none", "before_id=none"])
async def test_a_malformed_page_is_refused(surface: Surface, query: str) -> None:
    answer = await surface.get(f"/v1/models?{query}", anthropic_version="2023-06-01")
    assert answer.status == 400
    assert answer.json["error"]["details"]["param"] == query.partition("=")[0]


async def test_without_the_version_models_are_openais(surface: Surface) -> None:
    assert (await surface.get("/v1/models")).json["object"] == "list"


@pytest.mark.parametrize(("version", "status"), [("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400)])
async def test_the_version_is_known_or_refused(surface: Surface, version: str, status: int) -> None:
    answer = await surface.post(surface.body(), anthropic_version=version)
    assert answer.status == status
    assert status == 200 or answer.json["error"]["details"]["param"] == "anthropic-version"


async def test_the_answers_have_the_requests_id(surface: Surface) -> None:
    for stream in (False, True):
        answer = await surface.post(surface.body(stream=stream))
        assert answer.headers["request-id"] == answer.headers["X-Request-ID"]
        assert f"msg_{answer.headers['request-id']}".encode() in answer.body


async def test_an_unknown_path_below_messages_is_an_error_of_this_dialect(surface: Surface) -> None:
    answer = await surface.post({}, "/v1/messages/batches")
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert (await surface.get("/v1/messages")).json["error"]["type"] == "invalid_request_error"


async def test_a_foreign_page_gets_the_error_of_this_dialect(surface: Surface) -> None:
    answer = await surface.post(surface.body(), origin="https://evil.example")
    assert (answer.status, answer.json["error"]["type"]) == (403, "permission_error")
    assert not surface.played.calls


async def test_a_deadline_that_passes_is_a_timeout(surface: Surface) -> None:
    surface.played.fault = surface.device.cloud.fault = "stall"
    with pytest.raises(anthropic.APIStatusError) as late:
        await make(surface, stream=False, extra_headers={"x-causeway-deadline-ms": "50"})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")


async def test_a_key_in_both_headers_must_be_the_same(surface: Surface) -> None:
    same = await surface.post(surface.body(), authorization="Bearer one", x_api_key="one")
    other = await surface.post(surface.body(), authorization="Bearer one", x_api_key="two")
    assert (same.status, other.status) == (200, 400)
    assert other.json["error"]["details"]["param"] == "x-api-key"
