"""The body that is sent to a target: the whole request, without routing hints."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings

from causeway_server.router.openai.chat import parse_chat, text_chat
from causeway_server.router.openai.upstream.wire import encode_request, exchange_model
from causeway_server.router.types import Request, RoutingHints

from .values import chat_requests, hints


@pytest.mark.slow
@given(chat_requests(), hints)
@settings(max_examples=100)
def test_hints_are_never_sent(request: Request, wished: RoutingHints) -> None:
    body = encode_request(msgspec.structs.replace(request, hints=wished), "m")
    assert body == encode_request(msgspec.structs.replace(request, hints=RoutingHints()), "m")
    assert not [key for key in json.loads(body) if "causeway" in key.lower()]


def test_hints_of_the_body_are_never_sent() -> None:
    body = b"""{"model":"auto","messages":[{"role":"user","content":"hi"}],"zeta":[1],
        "causeway":{"prefer":"only_cloud","tags":["secret-tag"],"deadline_ms":987654}}"""
    sent = encode_request(parse_chat(body, RoutingHints(client="key-7", tags=("other-tag",))), "large")
    assert json.loads(sent) == {"model": "large", "messages": [{"role": "user", "content": "hi"}], "zeta": [1]}


@pytest.mark.parametrize(
    ("requested", "stream", "sent"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_a_stream_always_requests_its_usage(requested: bool, stream: bool | None, sent: bool) -> None:
    body = json.loads(encode_request(Request(kind="chat", model="a", stream=requested), "m", stream=stream))
    assert body.get("stream", False) is sent
    assert body.get("stream_options") == ({"include_usage": True} if sent else None)


@pytest.mark.parametrize("asks_usage", [True, False])
@pytest.mark.parametrize("model", ["auto", "größer", "a name that is longer"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True},
        {"stream": False, "user": "u"},
        {"temperature": 0.5, "max_tokens": 5},
        {"max_completion_tokens": 5, "temperature": 1, "stream": True},
    ],
)
def test_the_body_of_a_chat_of_texts_is_the_clients_with_another_model(
    more: dict[str, object], model: str, asks_usage: bool
) -> None:
    messages = [{"role": "system", "content": '"model":"auto"'}, {"role": "user", "content": '\n " größer'}]
    body = msgspec.json.encode({"model": "auto", "messages": messages, **more})
    plain = text_chat(body, RoutingHints())
    assert plain is not None
    sent = json.loads(exchange_model(plain.encoded, plain.request, model, ask_usage=asks_usage))
    wanted = json.loads(encode_request(plain.request, model, ask_usage=asks_usage))
    assert {"stream": False, **sent} == {"stream": False, **wanted}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_keeps_the_clients_name(name: str) -> None:
    body = json.dumps({"model": "a", "messages": [{"role": "user", "content": "x"}], name: 5}).encode()
    sent = json.loads(encode_request(parse_chat(body, RoutingHints()), "m"))
    assert {key: sent.get(key) for key in ("max_tokens", "max_completion_tokens")} == {
        "max_tokens": None,
        "max_completion_tokens": None,
        name: 5,
    }


def test_an_embedding_requests_numbers() -> None:
    request = Request(kind="embedding", model="a", prompts=("x",), dimensions=4, encoding_format="base64", user="u")
    assert json.loads(encode_request(request, "m")) == {"model": "m", "input": "x", "dimensions": 4, "user": "u"}
