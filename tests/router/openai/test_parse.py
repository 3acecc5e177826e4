"""Request bodies: valid ones become requests, each kind of invalid one gets its error."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.errors import InvalidJSON, InvalidRequest, MissingField, UnknownField, UnsupportedFeature
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.completions import parse_completion
from causeway_server.router.openai.embeddings import parse_embedding
from causeway_server.router.openai.upstream.wire import encode_request
from causeway_server.router.types import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

from .values import chat_requests, completion_requests, json_values

NONE = RoutingHints()
PARSERS = [parse_chat, parse_completion, parse_embedding]


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "auto", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def content(*parts: object) -> bytes:
    return chat(messages=[{"role": "user", "content": list(parts)}])


TOOL = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}


def allowed(*names: str, mode: str = "auto", others: Sequence[object] = ()) -> dict[str, object]:
    """The `tool_choice` of a chat."""
    tools: list[object] = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools, *others]}}


def test_every_chat_field_arrives() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "name": "eva",
                "content": [
                    {"type": "text", "text": "what is this?"},
                    {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
                    {"type": "input_audio", "input_audio": {"data": "UQ==", "format": "wav"}},
                    {"type": "file", "file": {"file_id": "f"}},
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "no"}],
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "assistant", "content": None, "refusal": "I will not"},
            {"role": "function", "name": "old", "content": "1"},
        ],
        temperature=1,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.1,
        seed=-7,
        logit_bias={"20": 1, "3": -100},
        max_completion_tokens=9,
        stop=["a", "b"],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        tools=[
            {"type": "function", "function": {"name": "lamp", "description": "d", "parameters": {}, "strict": True}}
        ],
        tool_choice={"type": "function", "function": {"name": "lamp"}},
        parallel_tool_calls=False,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"z": 1, "a": 2}, "strict": True},
        },
        logprobs=True,
        top_logprobs=3,
        user="u",
        metadata={"b": 1, "a": None},
        causeway={"prefer": "only_cloud", "tags": ["t"], "deadline_ms": 5},
    )
    assert parse_chat(body, RoutingHints(client="me")) == Request(
        kind="chat",
        model="auto",
        messages=(
            Message("developer", "be brief"),
            Message(
                "user",
                (
                    TextPart("what is this?"),
                    ImagePart("data:,x", "low"),
                    AudioPart("UQ==", "wav"),
                    FilePart('{"file_id":"f"}'),
                ),
                "eva",
            ),
            Message("assistant", (TextPart("no"),), None, (ToolCall("c1", "lamp", "{}"),)),
            Message("tool", "done", tool_call_id="c1"),
            Message("assistant", "I will not"),
            Message("function", "1", "old"),
        ),
        max_tokens=9,
        limit_name="max_completion_tokens",
        sampling=Sampling(1.0, 0.5, 40, 0.1, -1.0, 2.0, 1.1, -7, ((3, -100.0), (20, 1.0))),
        stop=("a", "b"),
        n=2,
        stream=True,
        include_usage=True,
        tools=(Tool("lamp", "d", "{}", True),),
        tool_choice=ToolChoice("function", "lamp"),
        parallel_tool_calls=False,
        response_format=ResponseFormat("json_schema", "s", '{"z":1,"a":2}', True),
        logprobs=3,
        user="u",
        extra='{"metadata":{"a":null,"b":1}}',
        hints=RoutingHints("only_cloud", ("t",), "me", 5),
    )


def test_null_is_absent() -> None:
    """As users of the official client send it."""
    nulls = dict.fromkeys(
        [
            "temperature",
            "stop",
            "n",
            "stream",
            "tools",
            "tool_choice",
            "response_format",
            "seed",
            "logprobs",
            "causeway",
        ]
    )
    assert parse_chat(chat(**nulls), NONE) == parse_chat(chat(), NONE)


def test_every_completion_field_arrives() -> None:
    body = {
        "model": "m",
        "prompt": ["a", ""],
        "max_tokens": 5,
        "logprobs": 2,
        "echo": True,
        "suffix": "z",
        "n": 3,
        "best_of": 3,
    }
    assert parse_completion(json.dumps(body).encode(), NONE) == Request(
        kind="completion", model="m", prompts=("a", ""), max_tokens=5, logprobs=2, echo=True, suffix="z", n=3
    )


@pytest.mark.parametrize(
    ("given_input", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_four_kinds_of_input(given_input: object, prompts: object) -> None:
    """A bare list of token ids is one input."""
    body = json.dumps({"model": "m", "input": given_input, "dimensions": 8, "encoding_format": "base64"}).encode()
    request = parse_embedding(body, NONE)
    assert (request.prompts, request.dimensions, request.encoding_format) == (prompts, 8, "base64")


@pytest.mark.parametrize(
    ("body", "param", "error"),
    [
        (b"", None, InvalidJSON),
        (b"  \n", None, InvalidJSON),
        (b"{", None, InvalidJSON),
        (b"{}x", None, InvalidJSON),
        (b"\xff", None, InvalidJSON),
        (b'{"model":"\xff"}', None, InvalidJSON),
        (b'{"zz":"\xff"}', None, InvalidJSON),
        (b'{"zz":"\\ud800"}', None, InvalidJSON),
        (b'{"zz":"\\udc00 x \\ud800 y"}', None, InvalidJSON),
        (b'{"temperature":NaN}', None, InvalidJSON),
        (b'{"temperature":1e999}', None, InvalidJSON),
        (b'{"zz":Infinity}', None, InvalidJSON),
        (b'{"zz":' + b"[" * 100_000, None, InvalidJSON),
        (b'{"zz":' + b'{"a":' * 100_000, None, InvalidJSON),
        (b'{"zz":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, InvalidJSON),
        (b'{"model":"a","model":"b"}', "model", InvalidJSON),
        (b'{"model":"a","mod\\u0065l":"b"}', "model", InvalidJSON),
        (b'{"messages":[{"role":"user","content":"a","content":"b"}]}', "content", InvalidJSON),
        (b"[]", None, InvalidRequest),
        (b"null", None, InvalidRequest),
        (b'"text"', None, InvalidRequest),
        (b"{}", "model", MissingField),
        (b'{"model":"m"}', "messages", MissingField),
        (b'{"messages":[{"role":"user","content":"a"}]}', "model", MissingField),
        (chat(model=3), "model", InvalidRequest),
        (chat(model=""), "model", InvalidRequest),
        (chat(messages=[]), "messages", InvalidRequest),
        (chat(messages="hi"), "messages", InvalidRequest),
        (chat(messages=[3]), "messages[0]", InvalidRequest),
        (chat(messages=[{"content": "x"}]), "messages[0].role", MissingField),
        (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role", InvalidRequest),
        (chat(messages=[{"role": "user"}]), "messages[0].content", MissingField),
        (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", MissingField),
        (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", InvalidRequest),
        (content(), "messages[0].content", InvalidRequest),
        (content({"type": "video_url"}), "messages[0].content[0].type", InvalidRequest),
        (content({"type": "text"}), "messages[0].content[0].text", MissingField),
        (content({"text": "x"}), "messages[0].content[0].type", MissingField),
        (content({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url", MissingField),
        (chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", MissingField),
        (chat(messages=[{"role": "function", "content": "x"}]), "messages[0].name", MissingField),
        (
            chat(messages=[{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]),
            "messages[0].function_call",
            UnsupportedFeature,
        ),
        (
            chat(
                messages=[
                    {
                        "role": "user",
                        "content": "x",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
                    }
                ]
            ),
            "messages[0].tool_calls",
            InvalidRequest,
        ),
        (chat(temperature=2.1), "temperature", InvalidRequest),
        (chat(temperature=-0.1), "temperature", InvalidRequest),
        (chat(temperature="hot"), "temperature", InvalidRequest),
        (chat(temperature=True), "temperature", InvalidRequest),
        (chat(temperature=10**400), "temperature", InvalidRequest),
        (chat(top_p=1.5), "top_p", InvalidRequest),
        (chat(min_p=-1), "min_p", InvalidRequest),
        (chat(presence_penalty=3), "presence_penalty", InvalidRequest),
        (chat(repeat_penalty=1.1, repetition_penalty=1.2), "repetition_penalty", InvalidRequest),
        (chat(n=0), "n", InvalidRequest),
        (chat(n=17), "n", InvalidRequest),
        (chat(n=1.5), "n", InvalidRequest),
        (chat(max_tokens=0), "max_tokens", InvalidRequest),
        (chat(max_tokens=2**31), "max_tokens", InvalidRequest),
        (chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens", InvalidRequest),
        (chat(seed=2**63), "seed", InvalidRequest),
        (chat(stop=""), "stop", InvalidRequest),
        (chat(stop=["a", ""]), "stop[1]", InvalidRequest),
        (chat(stop=["a"] * 5), "stop", InvalidRequest),
        (chat(stream_options={"include_usage": True}), "stream_options", InvalidRequest),
        (chat(stream=False, stream_options={}), "stream_options", InvalidRequest),
        (chat(logit_bias={"x": 1}), "logit_bias", InvalidRequest),
        (chat(logit_bias={"1": 101}), "logit_bias", InvalidRequest),
        (chat(logit_bias={str(10**30): 1}), "logit_bias", InvalidRequest),
        (chat(top_logprobs=2), "top_logprobs", InvalidRequest),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", InvalidRequest),
        (chat(logprobs=2), "logprobs", InvalidRequest),
        (chat(stream="yes"), "stream", InvalidRequest),
        (chat(stream_options=[]), "stream_options", InvalidRequest),
        (chat(tools=[{"type": "web_search"}], tool_choice="required"), "tool_choice", UnsupportedFeature),
        (
            chat(tools=[TOOL], tool_choice={"type": "custom", "custom": {"name": "x"}}),
            "tool_choice",
            UnsupportedFeature,
        ),
        (chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function", MissingField),
        (chat(guided_json={"type": "object"}), "guided_json", UnsupportedFeature),
        (chat(grammar="root ::= [a-z]"), "grammar", UnsupportedFeature),
        (chat(structured_outputs={"regex": "a"}), "structured_outputs", UnsupportedFeature),
        (chat(tools=[{"type": "function"}]), "tools[0].function", MissingField),
        (chat(tools=[TOOL, TOOL]), "tools[1].function.name", InvalidRequest),
        (chat(tool_choice="required"), "tool_choice", InvalidRequest),
        (chat(tools=[TOOL], tool_choice="lamp"), "tool_choice", InvalidRequest),
        (chat(tools=[TOOL], tool_choice={"type": "allowed_tools"}), "tool_choice.allowed_tools", MissingField),
        (chat(tools=[TOOL], tool_choice=allowed("x")), "tool_choice.allowed_tools.tools[0]", InvalidRequest),
        (
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "x"}}),
            "tool_choice.function.name",
            InvalidRequest,
        ),
        (chat(response_format={"type": "xml"}), "response_format.type", InvalidRequest),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema", MissingField),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
            "response_format.json_schema.schema",
            MissingField,
        ),
        (chat(functions=[]), "functions", UnsupportedFeature),
        (chat(function_call="auto"), "function_call", UnsupportedFeature),
        (chat(modalities=["text", "audio"]), "modalities", UnsupportedFeature),
        (chat(audio={"voice": "x"}), "audio", UnsupportedFeature),
        (chat(causeway={"prefer": "cloud"}), "causeway.prefer", InvalidRequest),
        (chat(causeway={"prefers": "only_cloud"}), "causeway.prefers", UnknownField),
        (chat(causeway={"deadline_ms": 0}), "causeway.deadline_ms", InvalidRequest),
        (chat(causeway={"tags": [""]}), "causeway.tags[0]", InvalidRequest),
        (chat(causeway={"continue": "token"}), "causeway.continue", UnknownField),
        (chat(causeway=[]), "causeway", InvalidRequest),
        (chat(causeway_prefer="only_on_device"), "causeway_prefer", UnknownField),
        (chat(**{"X-Causeway-Tags": "private"}), "X-Causeway-Tags", UnknownField),
        (chat(causway={"tags": ["private"]}), "causway", UnknownField),
        (chat(tags=["private"]), "tags", UnknownField),
        (chat(temprature=0), "temprature", UnknownField),
    ],
)
def test_bad_chat_bodies(body: bytes, param: str | None, error: type[InvalidRequest]) -> None:
    """Each error has the right class and the key's path as OpenAI writes it."""
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body, NONE)
    assert type(caught.value) is error
    assert caught.value.param == param
    assert param is None or f"`{param}`" in caught.value.message
    assert caught.value.message.endswith((".", "?"))


def test_a_continue_token_of_before_is_refused_with_advice() -> None:
    with pytest.raises(UnknownField, match="a truncated answer is not continued"):
        parse_chat(chat(causeway={"continue": "token"}), NONE)


@pytest.mark.parametrize(
    ("parse", "field", "meant"),
    [
        (parse_chat, "temprature", "temperature"),
        (parse_chat, "maxTokens", "max_tokens"),
        (parse_chat, "max_token", "max_tokens"),
        (parse_chat, "steam", "stream"),
        (parse_chat, "dedline_ms", "causeway.deadline_ms"),
        (parse_chat, "perfer", "causeway.prefer"),
        (parse_chat, "deadline_ms", "causeway.deadline_ms"),
        (parse_chat, "causway", "causeway"),
        (parse_completion, "logprob", "logprobs"),
        (parse_embedding, "dimension", "dimensions"),
    ],
)
def test_a_field_that_looks_like_a_known_one_is_refused_with_its_name(parse, field, meant) -> None:  # type: ignore[no-untyped-def]
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", field: 1}
    with pytest.raises(UnknownField, match=f"`{field}` is not a known field.*`{meant}`") as caught:
        parse(json.dumps(body).encode(), NONE)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "field",
    (
        "min_tokens top_a models stop_token_ids best_of max_new_tokens length_penalty typical_p prompt_logprobs "
        "n_predict metadata verbosity parse_tool_calls repetition_penalty_range"
    ).split(),
)
def test_fields_of_other_servers_are_passed_on(field: str) -> None:
    assert parse_chat(chat(**{field: 1}), NONE).extra == f'{{"{field}":1}}'


def test_tools_of_other_kinds_are_accepted_beside_functions() -> None:
    """Hosted and custom tools that no target here has: the functions are offered, the others are not."""
    others: list[object] = [
        {"type": "web_search"},
        {"type": "custom", "custom": {"name": "x"}},
        {"type": "mcp", "a": 1},
    ]
    assert parse_chat(chat(tools=[*others, TOOL]), NONE).tools == parse_chat(chat(tools=[TOOL]), NONE).tools != ()
    assert parse_chat(chat(tools=others), NONE).tools == ()
    assert parse_chat(chat(tools=others, tool_choice="auto"), NONE).tools == ()


FAN = {"type": "function", "function": {"name": "fan"}}
HOSTED: dict[str, object] = {"type": "web_search"}


@pytest.mark.parametrize(
    ("choice", "tools", "same_as"),
    [
        (allowed("lamp"), [FAN, TOOL], {"tools": [TOOL]}),
        (allowed("lamp", mode="required"), [TOOL, FAN], {"tools": [TOOL], "tool_choice": "required"}),
        (
            allowed("fan", "lamp", "lamp", mode="required"),
            [TOOL, FAN],
            {"tools": [TOOL, FAN], "tool_choice": "required"},
        ),
        (allowed("lamp", others=[HOSTED]), [TOOL, FAN, HOSTED], {"tools": [TOOL]}),
        (allowed(), [TOOL, FAN], {}),
    ],
    ids=["auto", "required", "both", "beside another kind", "none"],
)
def test_allowed_tools_are_those_that_the_request_has(
    choice: object, tools: object, same_as: dict[str, object]
) -> None:
    """No target, template, constraint or cache key can have one of the others."""
    assert parse_chat(chat(tools=tools, tool_choice=choice), NONE) == parse_chat(chat(**same_as), NONE)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("lamp", "nothing"), "tool_choice.allowed_tools.tools[1]"),
        (allowed(others=[HOSTED, {"type": "function"}]), "tool_choice.allowed_tools.tools[1]"),
        (allowed("lamp", mode="none"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed(mode="required"), "tool_choice"),
        (allowed(mode="required", others=[HOSTED]), "tool_choice"),
    ],
)
def test_allowed_tools_that_cannot_be_are_refused_by_name(choice: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(chat(tools=[TOOL, HOSTED], tool_choice=choice), NONE)
    assert refused.value.param == param


def test_a_json_object_with_a_schema_has_that_schema() -> None:
    wanted = parse_chat(chat(response_format={"type": "json_object", "schema": {"enum": [1]}}), NONE).response_format
    assert wanted is not None
    assert (wanted.kind, wanted.schema) == ("json_schema", '{"enum":[1]}')


@pytest.mark.parametrize(
    ("body", "values"),
    [
        (
            chat(messages=[{"role": "robot", "content": "x"}]),
            "Use system, developer, user, assistant, tool or function.",
        ),
        (chat(response_format={"type": "json"}), "Use text, json_object or json_schema."),
        (
            chat(tools=[{"type": "mcp"}, {"type": "web_search"}], tool_choice="required"),
            "of type mcp, web_search, which no target of this server has. Name a function, or send `auto`.",
        ),
        (content({"type": "video_url"}), "Use text, image_url, input_audio, file or refusal."),
        (content({"type": "image_url", "image_url": {"url": "x", "detail": "hi"}}), "Use auto, low or high."),
        (chat(causeway={"prefer": "cloud"}), "Use prefer_on_device, only_on_device, prefer_cloud or only_cloud."),
        (chat(causeway={"dedline_ms": 5}), "`causeway.dedline_ms` is not a known field, did you mean `deadline_ms`?"),
    ],
)
def test_an_unknown_value_is_answered_with_the_known_ones(body: bytes, values: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body, NONE)
    assert caught.value.message.endswith(values)


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_completion, {"model": "m"}, "prompt"),
        (parse_completion, {"model": "m", "prompt": []}, "prompt"),
        (parse_completion, {"model": "m", "prompt": [1, "a"]}, "prompt"),
        (parse_completion, {"model": "m", "prompt": [[]]}, "prompt"),
        (parse_completion, {"model": "m", "prompt": [-1]}, "prompt[0]"),
        (parse_completion, {"model": "m", "prompt": "a", "logprobs": 21}, "logprobs"),
        (parse_embedding, {"model": "m", "input": ""}, "input"),
        (parse_embedding, {"model": "m", "input": ["a", ""]}, "input[1]"),
        (parse_embedding, {"model": "m", "input": [[1], []]}, "input[1]"),
        (parse_embedding, {"model": "m", "input": {}}, "input"),
        (parse_embedding, {"model": "m", "input": "a", "dimensions": 0}, "dimensions"),
        (parse_embedding, {"model": "m", "input": "a", "encoding_format": "int8"}, "encoding_format"),
        (parse_embedding, {"model": "m", "input": ["a"] * 2049}, "input"),
    ],
)
def test_bad_prompts_and_inputs(parse, body, param) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps(body).encode(), NONE)
    assert caught.value.param == param


def test_messages_say_what_where_and_what_to_do() -> None:
    """An error does not repeat the client's text."""
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(temperature=3), NONE)
    assert caught.value.message == "`temperature`: expected `float` <= 2.0, got 3. Send a number from 0 to 2."
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(stop=[["secret"]]), NONE)
    assert "secret" not in caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(messages=[]), NONE)
    assert caught.value.message.startswith("`messages`: expected `array` of length >= 1, got 0. Send a list")


@pytest.mark.parametrize(
    ("header", "body", "merged"),
    [
        (None, "only_cloud", "only_cloud"),
        ("prefer_on_device", None, "prefer_on_device"),
        ("prefer_on_device", "only_on_device", "only_on_device"),
        ("only_cloud", "prefer_cloud", "only_cloud"),
        ("prefer_cloud", "prefer_cloud", "prefer_cloud"),
    ],
)
def test_the_narrower_preference_applies(header, body, merged) -> None:  # type: ignore[no-untyped-def]
    request = parse_chat(chat(causeway={"prefer": body}), RoutingHints(prefer=header))
    assert request.hints.prefer == merged


def test_hints_of_headers_and_body_are_merged() -> None:
    hints = RoutingHints(tags=("b",), client="key-1", deadline_ms=100)
    request = parse_chat(chat(causeway={"tags": ["a", "b"], "deadline_ms": 500}), hints)
    assert request.hints == RoutingHints(None, ("a", "b"), "key-1", 100)


@pytest.mark.parametrize(("header", "body"), [("only_on_device", "only_cloud"), ("prefer_cloud", "prefer_on_device")])
def test_contradicting_preferences_are_refused(header, body) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(causeway={"prefer": body}), RoutingHints(prefer=header))
    assert caught.value.param == "causeway.prefer"


def test_the_order_of_a_schema_is_kept() -> None:
    """A model answers in the order of the schema's properties, so canonical means compact, not sorted."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"why": {}, "answer": {}}}}}
    assert parse_chat(chat(tools=[tool]), NONE).tools[0].parameters == '{"properties":{"why":{},"answer":{}}}'


def test_other_spellings_are_not_repeated_keys() -> None:
    """Escapes, white space and long numbers make a body longer than its canonical form."""
    body = (
        b'{ "model" : "auto", "messages":[{"role":"user","content":"caf\\u00e9 \\/"}], "temperature": 1.000, "x": 1e2}'
    )
    request = parse_chat(body, NONE)
    assert (request.messages[0].content, request.extra) == ("café /", '{"x":100.0}')


@pytest.mark.slow
@given(chat_requests())
def test_a_chat_request_survives_a_round_trip(request: Request) -> None:
    """Without its hints."""
    again = parse_chat(encode_request(request, request.model), NONE)
    assert again == _without_wishes(request)


@given(completion_requests())
def test_a_completion_request_survives_a_round_trip(request: Request) -> None:
    again = parse_completion(encode_request(request, request.model), NONE)
    assert again == _without_wishes(request)


def _without_wishes(request: Request) -> Request:
    return msgspec.structs.replace(request, hints=NONE)


@given(st.sampled_from(PARSERS), st.binary(max_size=200))
def test_any_bytes_parse_or_raise_invalid_request(parse, body) -> None:  # type: ignore[no-untyped-def]
    _request_or_refusal(parse, body)


@given(st.sampled_from(PARSERS), json_values)
def test_any_json_parses_or_raises_invalid_request(parse, value) -> None:  # type: ignore[no-untyped-def]
    _request_or_refusal(parse, json.dumps(value).encode())


_FIELDS = [
    "model",
    "messages",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "top_logprobs",
    "causeway",
    "user",
    "prompt",
    "input",
    "echo",
    "suffix",
    "dimensions",
    "functions",
]
_LIKELY = st.sampled_from(
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [TOOL],
        {"type": "json_object"},
        {"type": "function", "function": {"name": "lamp"}},
        {"prefer": "only_cloud"},
        [1, 2],
        ["a"],
        "auto",
        1,
        True,
    ]
)


@given(st.sampled_from(PARSERS), st.dictionaries(st.sampled_from(_FIELDS), _LIKELY | json_values, max_size=8))
def test_any_fields_parse_or_raise_invalid_request(parse, fields) -> None:  # type: ignore[no-untyped-def]
    """What parses can also be encoded for a target."""
    document = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", **fields}
    request = _request_or_refusal(parse, json.dumps(document).encode())
    if request is not None:
        json.loads(encode_request(request, "m"))


@pytest.mark.slow
@given(chat_requests(), st.data())
def test_a_damaged_body_parses_or_raises_invalid_request(request: Request, data: st.DataObject) -> None:
    """One byte changed, removed or repeated in a valid body."""
    body = bytearray(encode_request(request, "m"))
    at = data.draw(st.integers(0, len(body) - 1))
    damage = data.draw(st.sampled_from(["change", "cut", "double"]))
    if damage == "change":
        body[at] = data.draw(st.integers(0, 255))
    elif damage == "cut":
        del body[at:]
    else:
        body[at:at] = body[at : at + 20]
    _request_or_refusal(parse_chat, bytes(body))


@pytest.mark.parametrize("depth", [100, 400, *range(900, 1000, 3)])
def test_nesting_near_the_interpreters_limit(depth: int) -> None:
    """At any depth, each step of parsing and encoding either works or refuses."""
    body = chat(zz="@", tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": "@"}}}])
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        core = "1" if opened == "[" else "{}"
        nested = (opened * depth + core + closed * depth).encode()
        request = _request_or_refusal(parse_chat, body.replace(b'"@"', nested))
        if request is not None:
            encode_request(request, "m")


def _request_or_refusal(parse, body: bytes) -> Request | None:  # type: ignore[no-untyped-def]
    try:
        request = parse(body, NONE)
    except InvalidRequest:
        return None
    assert isinstance(request, Request)
    return request


TEXTS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Short."}, {"role": "user", "content": 'é "quoted" \n\t \\ \u2028'}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}],
]
OF_TEXTS = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "max_tokens": 5},
    {"temperature": 2, "max_completion_tokens": 5, "stream": True},
    {"stream": False, "user": "u"},
    {"temperature": -0.0},
]


@pytest.mark.parametrize("more", OF_TEXTS)
@pytest.mark.parametrize("messages", TEXTS)
def test_a_chat_of_texts_means_what_it_means_with_another_field(
    messages: list[dict[str, str]], more: dict[str, object]
) -> None:
    """`n` of 1 is the default, and leads to the parser of all other chats."""
    hints = RoutingHints(client="c", tags=("a",))
    body = chat(messages=messages, **more)
    for spelled in (body, json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":")).encode()):
        assert parse_chat(spelled, hints) == parse_chat(chat(messages=messages, **more, n=1), hints)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"a","messages":[{"role":"user","content":"hi","content":"ho"}]}',
        b'{"model":"a","messages":[{"role":"user","content":"hi"}],"temperature":1,"temperature":0}',
        b'{"model":"a","messages":[{"role":"user","content":"hi"}],"temperature":3}',
        b'{"model":"a","messages":[{"role":"user","content":"hi"}],"temperature":true}',
        b'{"model":"a","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"max_completion_tokens":2}',
        b'{"model":"a","messages":[{"role":"nobody","content":"hi"}]}',
        b'{"model":"a","messages":[{"role":"user","content":null}]}',
        b'{"model":"","messages":[{"role":"user","content":"hi"}]}',
        b'{"model":"a","messages":[]}',
        b'{"model":"a","messages":[{"role":"user","content":"hi"}]} x',
    ],
)
def test_a_chat_of_texts_that_is_wrong_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body, NONE)
