"""Bodies of Messages as chat requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from causeway_server.router.anthropic.request import parse_count, parse_messages
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.types import Request, ResponseFormat, RoutingHints, Sampling

from .bodies import ACCEPTED, PLAIN, REFUSED, SCHEMA, Body, body_of

HINTS = RoutingHints(client="kiosk")


def parse(**fields: Any) -> Request:
    return parse_messages(json.dumps(body_of(fields)).encode(), HINTS)[0]


@pytest.mark.parametrize(("fields", "path"), REFUSED, ids=[f"{at}-{path}" for at, (_, path) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_its_path(fields: Body, path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"`.+`") as refused:
        parse(**fields)
    assert refused.value.param == path
    assert path.split("[")[0] in refused.value.message
    assert refused.value.message.endswith((".", "?"))


@pytest.mark.parametrize(("fields", "meaning"), ACCEPTED)
def test_a_body_means_a_chat(fields: Body, meaning: Body) -> None:
    assert parse(**fields) == msgspec.structs.replace(PLAIN, hints=HINTS, **meaning)


@pytest.mark.parametrize("fields", [{}, {"system": "s"}, {"temperature": 0}, {"temperature": 0.5, "stream": True}])
def test_a_plain_body_is_read_the_same_by_both_ways(fields: Body) -> None:
    """A null makes a body take the general way."""
    assert parse(**fields) == parse(**fields, top_p=None)


def test_a_message_is_the_same_request_as_the_chat_that_means_it() -> None:
    """So they share cache entries."""
    chat = {"model": "auto", "max_tokens": 9, "temperature": 0, "messages": [{"role": "user", "content": "a"}]}
    assert parse_chat(json.dumps(chat).encode(), HINTS) == parse(max_tokens=9, temperature=0)


def test_sampling_and_format_are_those_of_the_body() -> None:
    assert parse(temperature=0.5, top_p=0.9, top_k=7).sampling == Sampling(0.5, 0.9, 7)
    form = {"type": "json_schema", "schema": SCHEMA}
    expected = ResponseFormat("json_schema", "answer", json.dumps(SCHEMA, separators=(",", ":")), strict=True)
    assert parse(output_config={"format": form}).response_format == expected
    assert parse(output_format=form).response_format == expected


def test_hints_of_the_body_narrow_those_of_the_headers() -> None:
    hints = parse(causeway={"tags": ["Private"], "prefer": "only_on_device"}).hints
    assert (hints.tags, hints.prefer, hints.client) == (("private",), "only_on_device", "kiosk")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model":"a","model":"b"}', b"\xff", b'{"a":' * 5000], ids=lambda body: str(body)[:12]
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_messages(body, HINTS)
    with pytest.raises(InvalidRequest):
        parse_count(body, HINTS)


def test_a_key_that_appears_twice_is_refused_in_a_plain_body() -> None:
    body = json.dumps(body_of({})).replace('"role"', '"role": "user", "role"').encode()
    with pytest.raises(InvalidRequest, match="twice"):
        parse_messages(body, HINTS)


def test_a_count_needs_no_limit_and_takes_nothing_that_only_an_answer_has() -> None:
    counted = parse_count(json.dumps(body_of({"max_tokens": ..., "system": "s"})).encode(), HINTS)
    assert [message.role for message in counted.messages] == ["system", "user"]
    for name in ("max_tokens", "temperature", "stream", "stop_sequences"):
        with pytest.raises(InvalidRequest) as refused:
            parse_count(json.dumps(body_of({"max_tokens": ..., name: 1})).encode(), HINTS)
        assert refused.value.param == name
