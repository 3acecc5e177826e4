"""The official client: its errors, its helpers for streams, parsed answers and tools, and its asynchronous half."""

from __future__ import annotations

from typing import Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "wake me up at six am"}]


class Mood(pydantic.BaseModel):
    mood: Literal["good", "bad"]
    sure: bool


class SetAlarm(pydantic.BaseModel):
    """Set an alarm."""

    hour: Literal["six", "seven"]


def test_errors_become_the_clients_own(surface: Surface, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=surface.model, messages=ASK, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=surface.model, messages=ASK, temperature=9, stream=True)


def test_the_client_knows_each_requests_id(surface: Surface, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=surface.model, messages=ASK, max_tokens=2)
    assert raw.request_id
    assert raw.request_id == raw.headers["x-request-id"]


def test_models(surface: Surface, client: OpenAI) -> None:
    assert surface.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(surface.model).id == surface.model


def test_embeddings_which_the_client_requests_as_base64(surface: Surface, client: OpenAI) -> None:
    packed = client.embeddings.create(model=surface.model, input=["play jazz", "stop"])
    plain = client.embeddings.create(model=surface.model, input="play jazz", encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-4)
    assert packed.usage.prompt_tokens > plain.usage.prompt_tokens


def test_an_answer_is_parsed_into_a_class(surface: Surface, client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=surface.model, messages=ASK, response_format=Mood, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Mood)


def test_a_call_is_parsed_into_a_class(surface: Surface, client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=surface.model,
        messages=ASK,
        tools=[openai.pydantic_function_tool(SetAlarm)],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, SetAlarm)


def test_the_stream_helper_builds_the_whole_answer(surface: Surface, client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=surface.model, messages=ASK, temperature=0, max_tokens=24, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    whole = client.chat.completions.create(model=surface.model, messages=ASK, temperature=0, max_tokens=24)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_the_stream_helper_builds_calls(surface: Surface, client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=surface.model,
        messages=ASK,
        tools=[openai.pydantic_function_tool(SetAlarm)],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert final.choices[0].message.tool_calls
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, SetAlarm)


async def test_the_asynchronous_client(surface: Surface) -> None:
    async with AsyncOpenAI(base_url=surface.url, api_key=surface.api_key, max_retries=0, timeout=60) as client:
        whole = await client.chat.completions.create(model=surface.model, messages=ASK, temperature=0, max_tokens=24)
        stream = await client.chat.completions.create(
            model=surface.model, messages=ASK, temperature=0, max_tokens=24, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == whole.choices[0].message.content
        completion = await client.completions.create(model=surface.model, prompt="turn on", max_tokens=4, stream=True)
        assert [chunk async for chunk in completion]


def test_a_stream_that_is_closed_early_leaves_the_server_well(surface: Surface, client: OpenAI) -> None:
    for _ in range(3):
        stream = client.completions.create(model=surface.model, prompt="turn on", max_tokens=400, stream=True)
        next(iter(stream))
        stream.close()
    assert client.chat.completions.create(model=surface.model, messages=ASK, max_tokens=2).choices
