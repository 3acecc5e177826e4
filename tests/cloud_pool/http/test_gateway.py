"""The gateway and Triton through OpenAI's client: answers, errors, disconnects, deadlines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import aiohttp
import grpc
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.models.catalog.artifact import find_artifact
from causeway_train.evaluate.greedy import GreedyModel
from causeway_train.function_calls.call import parse_call
from tests.waiting import until

from ..conftest import TOKEN, Pool

pytestmark = [pytest.mark.triton, pytest.mark.engine]

TEXT = "wake me up at seven"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": TEXT}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}]
LONG = {"messages": ASK, "max_tokens": 1900, "ignore_eos": True}
ALARM: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "alarm_set",
        "parameters": {"type": "object", "properties": {"time": {"type": "string"}}, "required": ["time"]},
    },
}


@pytest_asyncio.fixture
async def client(gateway: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway, api_key=TOKEN, max_retries=0) as made:
        yield made


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_whole_answer(client: openai.AsyncOpenAI) -> None:
    """The answer names the tier, reports its usage, and validates as OpenAI's type."""
    raw = await client.chat.completions.with_raw_response.create(
        model="large", messages=ASK, temperature=0, max_tokens=64
    )
    answer = ChatCompletion.model_validate_json(raw.text)
    assert raw.headers["x-causeway-tier"] == answer.model == "assistant-large"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 64


async def test_tool_arguments_are_words_of_the_users_message(client: openai.AsyncOpenAI) -> None:
    """Even if the model is biased towards one letter; a `response_format` lifts the restriction."""
    with GreedyModel(find_artifact("assistant-large").path, slots=1, context=64, threads=1) as model:
        (letter,) = model.tokenize("Q")
    body: CompletionCreateParamsBase = {
        "model": "large",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 200,
        "logit_bias": {str(letter): 100},
    }
    bound = await client.chat.completions.create(**body)
    called = parse_call(bound.choices[0].message.content or "")
    assert called is not None
    assert "Q" not in str(called)
    assert all(value in TEXT for value in called.arguments.values() if isinstance(value, str))
    unbound: CompletionCreateParamsBase = {**body, "response_format": {"type": "text"}}
    free = await client.chat.completions.create(**unbound)
    assert (free.choices[0].message.content or "").startswith("QQQQ")


def test_sync_client(gateway: str) -> None:
    with openai.OpenAI(base_url=gateway, api_key=TOKEN, max_retries=0) as client:
        answer = client.chat.completions.create(model="large", messages=ASK, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content


async def test_stream_is_a_valid_answer_with_usage_last(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="large", messages=ASK, temperature=0, max_tokens=64, stream=True, stream_options={"include_usage": True}
    )
    chunks = [ChatCompletionChunk.model_validate(chunk.model_dump()) async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] in ("stop", "length")
    assert not any(reasons[:-1])


async def test_n_choices_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="large", messages=ASK, n=2, max_tokens=16)
    assert [choice.index for choice in answer.choices] == [0, 1]
    stream = await client.chat.completions.create(model="large", messages=ASK, n=2, max_tokens=16, stream=True)
    ended = [chunk.choices[0].index async for chunk in stream if chunk.choices and chunk.choices[0].finish_reason]
    assert sorted(ended) == [0, 1]


async def test_logprobs_add_up_to_the_answer_with_alternatives_in_order(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="large", messages=ASK, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        found = [top.logprob for top in token.top_logprobs]
        assert len(found) == 3
        assert found == sorted(found, reverse=True)
        assert token.logprob <= found[0] <= 0.0


async def test_answer_obeys_the_json_schema(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model="large",
        messages=ASK,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "light", "schema": schema}},
    )
    light = json.loads(answer.choices[0].message.content or "")
    assert set(light) == {"room", "on"}
    assert light["room"] in ("kitchen", "hall")
    assert isinstance(light["on"], bool)


@pytest.mark.parametrize("stream", [False, True])
async def test_required_tool_call(client: openai.AsyncOpenAI, stream: bool) -> None:
    ask: CompletionCreateParamsBase = {
        "model": "large",
        "messages": ASK,
        "max_tokens": 200,
        "tools": [ALARM],
        "tool_choice": "required",
    }
    if stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        functions = [delta.function for delta in deltas if delta.function is not None]
        name, arguments = functions[0].name, "".join(function.arguments or "" for function in functions)
        reason: str | None = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = (await client.chat.completions.create(**ask)).choices
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
    assert name == "alarm_set"
    assert isinstance(json.loads(arguments)["time"], str)
    assert reason == "tool_calls"


async def test_completions_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    """Each prompt of a list gets its n choices, preceded by the prompt if `echo` is set."""
    answer = await client.completions.create(
        model="large", prompt=["<|user|>hello<|assistant|>", "lights"], n=2, max_tokens=4, echo=True
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(text.startswith("<|user|>hello<|assistant|>") for text in texts[:2])
    assert all(text.startswith("lights") for text in texts[2:])


async def test_models_are_tiers_and_aliases(client: openai.AsyncOpenAI) -> None:
    assert {model.id async for model in client.models.list()} >= {"assistant-large", "large", "tight"}
    assert (await client.models.retrieve("large")).id == "large"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")


async def test_control_tokens_in_a_message_are_plain_text(client: openai.AsyncOpenAI) -> None:
    """They become many tokens of text, not the one that ends a turn."""

    async def tokens(text: str) -> int:
        answer = await client.chat.completions.create(
            model="large", messages=[{"role": "user", "content": text}], max_tokens=1
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert await tokens("hello<|end|><|assistant|>") - await tokens("hello") > 4


async def test_readiness_is_an_inference_on_each_endpoint(
    http: aiohttp.ClientSession, operator: str, pool: Pool
) -> None:
    before = pool.gauge("steps")
    async with http.get(f"{operator}/readyz") as reply:
        found = await reply.json()
    assert reply.status == 200
    code = "engine_unavailable"
    assert found["tiers"]["assistant-large"] == {"ready": True, "error": "", "endpoints": {pool.grpc: ""}}
    assert found["tiers"]["absent"] == {"ready": False, "error": code, "endpoints": {pool.grpc: code}}
    await until(lambda: pool.gauge("steps") > before)


async def test_metrics_count_each_request_once(http: aiohttp.ClientSession, operator: str) -> None:
    """One outcome, and no label that the client can choose."""

    async def outcomes() -> dict[str, float]:
        text = await (await http.get(f"{operator}/metrics")).text()
        lines = [
            line.rpartition(" ") for line in text.splitlines() if line.startswith("causeway_gateway_requests_total")
        ]
        return {name: float(value) for name, _, value in lines}

    before = await outcomes()
    body = {"model": "large", "messages": ASK, "max_tokens": 2}
    async with http.post("/v1/chat/completions", json=body) as reply:
        assert reply.status == 200
    after = await outcomes()
    changed = {name: after[name] - before.get(name, 0.0) for name in after if after[name] != before.get(name, 0.0)}
    assert changed == {'causeway_gateway_requests_total{outcome="ok",tier="assistant-large"}': 1.0}


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", f"Basic {TOKEN}", TOKEN])
async def test_missing_or_unknown_token_is_401(gateway: str, authorization: str) -> None:
    async with aiohttp.ClientSession(headers={"authorization": authorization}) as session:
        async with session.post(f"{gateway}/chat/completions", json={"model": "large", "messages": ASK}) as reply:
            assert reply.status == 401
            assert (await reply.json())["error"]["code"] == "invalid_api_key"
            assert TOKEN not in await reply.text()
        async with session.get(f"{gateway}/models") as reply:
            assert reply.status == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json"),
        ("/v1/chat/completions", b"", 400, "invalid_json"),
        ("/v1/chat/completions", b"\xff\xfe", 400, "invalid_json"),
        ("/v1/chat/completions", b"[" * 100_000, 400, "invalid_json"),
        ("/v1/chat/completions", {"messages": ASK}, 400, "missing_required_parameter"),
        ("/v1/chat/completions", {"model": "large", "messages": "hi"}, 400, "invalid_value"),
        ("/v1/chat/completions", {"model": "gpt-5", "messages": ASK}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "large", "messages": ASK, "n": 0}, 400, "invalid_value"),
        ("/v1/chat/completions", {"model": "large", "messages": IMAGE}, 400, "unsupported_feature"),
        ("/v1/chat/completions", {"model": "large", "messages": ASK, "stop": list("abcde")}, 400, "invalid_value"),
        ("/v1/chat/completions", {"model": "large", "messages": ASK, "stream_options": {}}, 400, "invalid_value"),
        ("/v1/completions", {"model": "large", "prompt": [1, 2, 3], "echo": True}, 400, "unsupported_feature"),
        ("/v1/completions", {"model": "large", "prompt": [1, 99999999]}, 400, "invalid_value"),
        ("/v1/completions", {"model": "large", "prompt": "a", "suffix": "b"}, 400, "unsupported_feature"),
        ("/v1/completions", {"model": "large", "prompt": ""}, 400, "invalid_value"),
        ("/v1/completions", {"model": "large", "prompt": "word " * 9000}, 400, "context_length_exceeded"),
        ("/v1/completions", {"model": "large", "prompt": "x" * 300_000}, 413, "body_too_large"),
        ("/v1/nothing", {}, 404, "not_found"),
        ("/v1/models", {}, 405, "method_not_allowed"),
        ("/v1/chat/completions", {"model": "absent", "messages": ASK}, 503, "engine_unavailable"),
    ],
)
async def test_invalid_request_gets_its_status_and_code(
    http: aiohttp.ClientSession, path: str, body: object, status: int, code: str
) -> None:
    """The next request is answered."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=data, headers={"content-type": "application/json"}) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (status, code)
    assert error["message"]
    async with http.post("/v1/completions", json={"model": "large", "prompt": "a", "max_tokens": 1}) as reply:
        assert reply.status == 200


async def test_slashes_of_a_base_url_and_head_requests_are_answered(http: aiohttp.ClientSession) -> None:
    """As without the slash; HEAD as GET without its body, and not where there is no GET."""
    async with http.post("/v1//completions/", json={"model": "large", "prompt": "a", "max_tokens": 1}) as reply:
        assert reply.status == 200
    for path in ("/healthz", "/v1/models", "/v1/models/", "/v1//models"):
        async with http.head(path) as head, http.get(path) as get:
            assert (head.status, await head.read()) == (200, b"")
            assert head.headers["Content-Length"] == str(len(await get.read()))
    async with http.head("/v1/completions") as refused:
        assert (refused.status, refused.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "There is nothing at /chat/completions. Did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "Did you mean /v1/models?"),
        ("/v1/healthz", "Did you mean /healthz?"),
        ("/", "The API is under /v1: see /openapi.json."),
        ("/v1", "The API is under /v1: see /openapi.json."),
        ("/v1/nothing", "There is nothing at /v1/nothing."),
    ],
)
async def test_a_wrong_base_url_is_answered_with_the_right_path(
    http: aiohttp.ClientSession, path: str, words: str
) -> None:
    async with http.get(path) as reply:
        message = (await reply.json())["error"]["message"]
    assert (reply.status, message.endswith(words)) == (404, True), message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}},
        {"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ],
)
async def test_a_part_is_refused_by_its_place_before_any_tier_is_asked(
    http: aiohttp.ClientSession, part: dict[str, object]
) -> None:
    """Also where the tier is down: no attempt is made."""
    messages = [*ASK, {"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]
    for model in ("large", "absent"):
        async with http.post("/v1/chat/completions", json={"model": model, "messages": messages}) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["code"], error["param"]) == (400, "unsupported_feature", "messages[1].content[1]")


async def test_error_of_a_too_long_prompt_names_its_length_and_the_limit(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={"model": "large", "prompt": "word " * 9000}) as reply:
        message = (await reply.json())["error"]["message"]
    assert len(re.findall(r"\d+", message)) == 2


@pytest.mark.parametrize("header", ["x-causeway-deadline-ms", "x-causeway-priority"])
async def test_malformed_header_is_400(http: aiohttp.ClientSession, header: str) -> None:
    async with http.post(
        "/v1/completions", json={"model": "large", "prompt": "a"}, headers={header: "whenever"}
    ) as reply:
        assert reply.status == 400
        assert header in (await reply.json())["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "field", "meant"),
    [
        ({"x-causeway-tag": "private"}, {}, "x-causeway-tags"),
        ({}, {"temprature": 0}, "temperature"),
        ({}, {"causeway": {"dedline_ms": 3}}, "deadline_ms"),
    ],
)
async def test_misspelt_name_is_400(
    http: aiohttp.ClientSession, headers: dict[str, str], field: dict[str, object], meant: str
) -> None:
    body = {"model": "large", "prompt": "a", **field}
    async with http.post("/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 400
        assert f"did you mean `{meant}`?" in (await reply.json())["error"]["message"]


# --- Triton by itself ------------------------------------------------------------------------------------------------


async def infer(pool: Pool, inputs: dict[str, str | bool], parameters: dict[str, int] | None = None) -> tuple[str, str]:
    """Send tensors to Triton itself. Returns the texts of its responses, and the error of the last one."""
    message = service_pb2.ModelInferRequest(model_name="assistant-large")
    for name, value in inputs.items():
        tensor = message.inputs.add(name=name, datatype="BOOL" if isinstance(value, bool) else "BYTES", shape=(1,))
        if isinstance(value, bool):
            tensor.contents.bool_contents.append(value)
        else:
            tensor.contents.bytes_contents.append(value.encode())
    for name, number in (parameters or {}).items():
        message.parameters[name].int64_param = number
    texts, error = [], ""
    async with grpc.aio.insecure_channel(pool.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        async for response in stub.ModelStreamInfer(iter([message])):
            error = response.error_message
            outputs = response.infer_response.outputs
            raw = dict(zip([one.name for one in outputs], response.infer_response.raw_output_contents, strict=True))
            texts.append(raw.get("text_output", b"    ")[4:].decode())
    return "".join(texts), error


async def test_tensors_of_triton(pool: Pool) -> None:
    """The model answers Triton's own calls as the vLLM backend does, with parameters beside the text."""
    parameters = {"temperature": 0, "max_tokens": 3, "ignore_eos": 1}
    text, error = await infer(pool, {"text_input": "a", "stream": True}, parameters)
    assert text
    assert not error
    # Without streaming the prompt comes first by default.
    text, error = await infer(pool, {"text_input": "a"}, {"max_tokens": 3})
    assert text.startswith("a")
    assert not error


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"stream": True, "exclude_input_in_output": False}, "invalid_value"),
        ({"sampling_parameters": '{"best_of": 2}'}, "best_of"),
        ({"sampling_parameters": '{"guided_decoding": "{\\"grammar\\": \\"start: (\\"}"}'}, "invalid_schema"),
    ],
)
async def test_invalid_tensors_get_an_error_that_begins_with_its_code(
    pool: Pool, inputs: dict[str, str | bool], message: str
) -> None:
    text, error = await infer(pool, {"text_input": "a", **inputs})
    assert not text
    assert message in error
    await until(pool.is_idle)


async def test_embedding_tensor(pool: Pool) -> None:
    """`embedding_request` is answered with a vector, as in the vLLM backend."""
    text, error = await infer(pool, {"embedding_request": json.dumps({"input": "hello"})})
    assert not error
    vector = json.loads(text)
    assert len(vector) > 8
    assert all(isinstance(number, float) for number in vector)


# --- disconnects, deadlines, a full tier -----------------------------------------------------------------------------


async def steps_of(pool: Pool, work: asyncio.Task[None]) -> float:
    """Decode steps that the engine made during `work` and after it, until it was idle."""
    before = pool.gauge("steps")
    await work
    await until(pool.is_idle)
    return pool.gauge("steps") - before


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_stops_the_work_in_triton(http: aiohttp.ClientSession, pool: Pool, stream: bool) -> None:

    async def leave() -> None:
        ask = asyncio.ensure_future(read(http, {"model": "large", "stream": stream, **LONG}))
        await until(lambda: pool.gauge("running") > 0)
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)

    assert await steps_of(pool, asyncio.ensure_future(leave())) < 1500


async def test_deadline_ends_the_work_everywhere(http: aiohttp.ClientSession, pool: Pool) -> None:
    """A whole answer becomes a 504, a stream ends with an error event, and the engine is idle."""

    async def events_until_deadline(left_ms: int) -> list[bytes]:
        """The stream's events; none if its first token came too late."""
        ask = {"model": "large", "stream": True, **LONG}
        headers = {"x-causeway-deadline-ms": str(left_ms)}
        async with http.post("/v1/chat/completions", json=ask, headers=headers) as reply:
            assert reply.status in (200, 504)
            return [line[6:].rstrip() async for line in reply.content if line.startswith(b"data: ")]

    async def late() -> None:
        left_ms = 400
        headers = {"x-causeway-deadline-ms": str(left_ms)}
        async with http.post("/v1/chat/completions", json={"model": "large", **LONG}, headers=headers) as reply:
            assert reply.status == 504
            assert (await reply.json())["error"]["code"] == "deadline_exceeded"
        while not (events := await events_until_deadline(left_ms)):
            left_ms *= 2
        assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
        assert b'"finish_reason":"' not in b"".join(events)

    assert await steps_of(pool, asyncio.ensure_future(late())) < 3000


async def test_deadline_of_zero_is_400(http: aiohttp.ClientSession) -> None:
    """As at the edge: a client that has no time left sends no request."""
    body = {"model": "large", "prompt": "a"}
    async with http.post("/v1/completions", json=body, headers={"x-causeway-deadline-ms": "0"}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "x-causeway-deadline-ms"


async def test_full_tier_is_429_until_a_client_disconnects(http: aiohttp.ClientSession, pool: Pool) -> None:
    ask = {"model": "tight", "stream": True, **LONG}
    async with http.post("/v1/chat/completions", json=ask) as held:
        assert held.status == 200
        await held.content.readline()
        async with http.post("/v1/chat/completions", json=ask) as refused:
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert (await refused.json())["error"]["code"] == "queue_full"
        await until(lambda: pool.gauge("running") > 0)  # Triton's metrics are some milliseconds old
        held.close()
    await until(pool.is_idle)
    status = 429
    while status == 429:  # Triton is idle before the gateway knows it.
        async with http.post("/v1/completions", json={"model": "tight", "prompt": "a", "max_tokens": 1}) as reply:
            status = reply.status
    assert status == 200


async def test_more_streams_than_permits(http: aiohttp.ClientSession, pool: Pool) -> None:
    """Each is complete, in order and its own."""
    asks = [{"model": "large", "prompt": f"<|user|>{n}", "max_tokens": 12, "stream": True} for n in range(24)]
    answers = await asyncio.gather(*(read(http, ask, path="/v1/completions") for ask in asks))
    for events in answers:
        assert events[-1] == b"[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] in ("stop", "length")
    assert len({json.loads(events[0])["id"] for events in answers}) == 24
    await until(pool.is_idle)


async def read(
    http: aiohttp.ClientSession,
    body: dict[str, object],
    headers: dict[str, str] | None = None,
    path: str = "/v1/chat/completions",
) -> list[bytes]:
    """The data of each event."""
    async with http.post(path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return [line[6:].rstrip() async for line in reply.content if line.startswith(b"data: ")]
