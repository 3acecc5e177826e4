"""`/v1/responses` through the official client, which validates what it reads."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import OpenAI
from openai.types.responses import FunctionToolParam, ResponseInputParam

from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

ASK = "wake me up at six am"
ALARM: FunctionToolParam = {
    "type": "function",
    "name": "set_alarm",
    "description": "Set an alarm.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"hour": {"enum": ["six", "seven"]}},
        "required": ["hour"],
        "additionalProperties": False,
    },
}


class Mood(pydantic.BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


def test_the_answer_is_that_of_a_chat(surface: Surface, client: OpenAI) -> None:
    """With the same headers; a request of either kind may get the other's cached answer."""
    raw = client.responses.with_raw_response.create(
        model=surface.model, input=ASK, temperature=0, max_output_tokens=24, store=False
    )
    response = raw.parse()
    chat = client.chat.completions.create(
        model=surface.model, messages=[{"role": "user", "content": ASK}], temperature=0, max_tokens=24
    )
    assert response.output_text == (chat.choices[0].message.content or "")
    assert response.status == "completed"
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert raw.headers["x-request-id"]
    route = "x-causeway-route" if surface.name.startswith("edge") else "x-causeway-tier"
    assert raw.headers[route]


def test_a_stream_builds_the_whole_answer(surface: Surface, client: OpenAI) -> None:
    with client.responses.stream(model=surface.model, input=ASK, temperature=0, max_output_tokens=24) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    whole = client.responses.create(model=surface.model, input=ASK, temperature=0, max_output_tokens=24)
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_is_called_and_its_result_is_read(surface: Surface, client: OpenAI, stream: bool) -> None:
    fields: Any = {"model": surface.model, "tools": [ALARM], "temperature": 0, "max_output_tokens": 60}
    if stream:
        with client.responses.stream(input=ASK, tool_choice="required", **fields) as events:
            kinds = [event.type for event in events]
            first = events.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 1
    else:
        first = client.responses.create(input=ASK, tool_choice="required", **fields)
    (call,) = first.output
    assert call.type == "function_call"
    assert call.name == "set_alarm"
    history: ResponseInputParam = [
        {"role": "user", "content": ASK},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    assert client.responses.create(input=history, tool_choice="none", **fields).status in ("completed", "incomplete")


def test_an_answer_is_parsed_into_a_class(surface: Surface, client: OpenAI) -> None:
    response = client.responses.parse(
        model=surface.model, input=ASK, text_format=Mood, temperature=0, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Mood)


def test_an_answer_that_reaches_its_limit_is_incomplete(surface: Surface, client: OpenAI) -> None:
    response = client.responses.create(model=surface.model, input=ASK, temperature=0, max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_not_stored_is_refused(surface: Surface, client: OpenAI, stream: bool) -> None:
    refused_fields: list[Any] = [{"previous_response_id": "resp_1"}, {"truncation": "auto"}]
    for fields in refused_fields:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
            client.responses.create(model=surface.model, input=ASK, stream=stream, **fields)
        assert refused.value.param == next(iter(fields))
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input=ASK, stream=stream)


def test_a_stored_response_is_read_continued_and_deleted(surface: Surface, client: OpenAI) -> None:
    fields: Any = {"model": surface.model, "temperature": 0, "max_output_tokens": 4, "store": True}
    first = client.responses.create(input=ASK, **fields)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(input="and then?", previous_response_id=first.id, **fields)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="and then?", previous_response_id=second.id, **fields)
