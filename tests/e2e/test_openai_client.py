"""The official `openai` client against the edge: its own types validate every answer and every chunk."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from tests.stack import Stack

from .requests import LONG_ANSWER, SHORT, get

pytestmark = [pytest.mark.triton, pytest.mark.engine]
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": SHORT}]
TARGETS = ["small", "large"]
ALARM: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "set_alarm",
        "description": "Set an alarm",
        "parameters": {
            "type": "object",
            "properties": {"time": {"type": "string", "maxLength": 12}},
            "required": ["time"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
async def aclient(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.edge_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def strict(chunk: ChatCompletionChunk) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)


def test_the_first_example_hits_the_cache_the_second_time(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """It sets no temperature: the targets' own is 0."""
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "first-answer.md"
    example = re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)[0]
    assert "temperature" not in example
    program = example.replace("http://127.0.0.1:8080", stack.edge_url)
    answers = []
    for _ in range(2):
        names: dict[str, object] = {}
        exec(program, names)
        answers.append(names["answer"])
    assert answers[1].headers["x-causeway-cache"] == "hit"  # type: ignore[attr-defined]
    assert capsys.readouterr().out


@pytest.mark.parametrize("model", TARGETS)
def test_whole_answer(client: OpenAI, model: str) -> None:
    """With usage, from the device and from the cloud."""
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


@pytest.mark.parametrize("model", TARGETS)
def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, model: str) -> None:
    """Chunks validate, share one id, end with finish_reason and then usage, and spell the whole answer's text."""
    body: CompletionCreateParamsBase = {"model": model, "messages": MESSAGES, "temperature": 0, "seed": 5}
    whole = client.chat.completions.create(**body)
    with_usage: CompletionCreateParamsBase = {**body, "stream_options": {"include_usage": True}}
    chunks = [strict(chunk) for chunk in client.chat.completions.create(**with_usage, stream=True)]
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens if whole.usage else False


@pytest.mark.parametrize("model", TARGETS)
def test_two_choices(client: OpenAI, model: str) -> None:
    """n=2 gives two choices, whole and streamed."""
    answer = client.chat.completions.create(model=model, messages=MESSAGES, n=2, temperature=0.8, max_tokens=12)
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, n=2, temperature=0.8, max_tokens=12, stream=True
    )
    ended = [c.choices[0].index for c in map(strict, stream) if c.choices and c.choices[0].finish_reason]
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("model", TARGETS)
def test_logprobs(client: OpenAI, model: str) -> None:
    """With greedy decoding the chosen token is the best alternative."""
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3, max_tokens=6
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token


@pytest.mark.parametrize("model", TARGETS)
def test_json_schema(client: OpenAI, model: str) -> None:
    """The answer conforms to the schema."""
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["mood", "level"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "mood", "schema": schema, "strict": True}},
    )
    answer_object = json.loads(answer.choices[0].message.content or "")
    assert answer_object["mood"] in ("good", "bad")
    assert 0 <= answer_object["level"] <= 9


@pytest.mark.parametrize("model", TARGETS)
def test_a_required_tool_is_called(client: OpenAI, model: str) -> None:
    """tool_choice by name gives a tool call with arguments of the tool's schema, whole and streamed."""
    body: CompletionCreateParamsBase = {
        "model": model,
        "messages": MESSAGES,
        "temperature": 0,
        "tools": [ALARM],
        "tool_choice": {"type": "function", "function": {"name": "set_alarm"}},
    }
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.tool_calls
    call = answer.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "set_alarm"
    assert isinstance(json.loads(call.function.arguments)["time"], str)
    chunks = [strict(chunk) for chunk in client.chat.completions.create(**body, stream=True)]
    deltas = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or []]
    assert deltas[0].function is not None
    assert deltas[0].function.name == "set_alarm"
    streamed = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert json.loads(streamed) == json.loads(call.function.arguments)


@pytest.mark.parametrize("model", TARGETS)
def test_an_offered_tool_wins_over_the_models_own_functions(client: OpenAI, model: str) -> None:
    """With tool_choice auto too: our assistants would call a function of their own catalogue."""
    tool: openai.types.chat.ChatCompletionToolParam = {
        "type": "function",
        "function": {**ALARM["function"], "name": "wake_me"},
    }
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, tools=[tool])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].type == "function"
    assert choice.message.tool_calls[0].function.name == "wake_me"
    assert "time" in json.loads(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("model", TARGETS)
def test_logprobs_zero_gives_the_chosen_tokens(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="turn on", max_tokens=3, temperature=0, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == 3
    assert logprobs.top_logprobs is None


@pytest.mark.parametrize("model", TARGETS)
def test_a_prompt_of_token_ids(client: OpenAI, model: str) -> None:
    """Counted exactly; an id that the model does not have is the client's mistake."""
    answer = client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=3, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    several = client.completions.create(model=model, prompt=[[5, 6], [7, 8]], max_tokens=3, temperature=0)
    assert len(several.choices) == 2
    with pytest.raises(openai.BadRequestError, match="Token id 99999999"):
        client.completions.create(model=model, prompt=[5, 99999999], max_tokens=3)


@pytest.mark.parametrize("model", TARGETS)
def test_legacy_completion(client: OpenAI, model: str) -> None:
    """`/v1/completions`, whole and streamed."""
    answer = client.completions.create(model=model, prompt="turn on", max_tokens=4, temperature=0)
    Completion.model_validate(answer.model_dump(), strict=True)
    stream = client.completions.create(model=model, prompt="turn on", max_tokens=4, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in stream if c.choices) == answer.choices[0].text


def test_embeddings(client: OpenAI) -> None:
    """Same text, same unit vector; base64 (the client's default) and float agree."""
    packed = client.embeddings.create(model="small", input=[SHORT, "play jazz"])
    CreateEmbeddingResponse.model_validate(packed.model_dump(), strict=True)
    plain = client.embeddings.create(model="small", input=SHORT, encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-3)
    assert len(packed.data) == 2


async def test_async_client_streams(aclient: AsyncOpenAI) -> None:
    """The asynchronous client, whole and streamed."""
    whole = await aclient.chat.completions.create(model="auto", messages=MESSAGES, temperature=0)
    stream = await aclient.chat.completions.create(model="auto", messages=MESSAGES, temperature=0, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("model", TARGETS)
async def test_closing_a_stream_cancels_the_generation(stack: Stack, aclient: AsyncOpenAI, model: str) -> None:
    """The record says cancelled, and the next request is answer."""
    stream = await aclient.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, stream=True, **LONG_ANSWER
    )
    decision = stream.headers["x-causeway-decision"]
    chunks = stream.parse()
    async for _ in chunks:
        break
    await chunks.close()
    assert (await aclient.chat.completions.create(model=model, messages=MESSAGES, temperature=0)).choices
    record = get(f"{stack.edge_url}/v1/decisions/{decision}")
    assert record["outcome"]["status"] == "cancelled"


def test_invalid_requests_raise_the_clients_own_errors(client: OpenAI) -> None:
    """With the path of the invalid key."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="auto", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
