"""The cache key covers everything that changes an answer, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.decision.decide import KEY_BYTES, UNKEYED_FIELDS, fingerprint
from causeway_server.router.types import (
    ImagePart,
    Message,
    Prefer,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.router.openai.values import chat_requests, completion_requests

pytestmark = pytest.mark.slow

BASE = Request(
    kind="chat",
    model="auto",
    messages=(Message("system", "be brief"), Message("user", "hi")),
    tools=(Tool("lamp"),),
    response_format=ResponseFormat("json_schema", "s", "{}"),
)

# Every field of Request, with other values than BASE has. A new field fails the test until it is decided here.
CHANGES: dict[str, list[object]] = {
    "kind": ["completion", "embedding"],
    "model": ["small"],
    "messages": [
        (Message("system", "be brief"), Message("user", "hi ")),
        (Message("system", "be long"), Message("user", "hi")),
        (Message("system", "be brief"), Message("developer", "hi")),
        (Message("user", "hi"), Message("system", "be brief")),
        (Message("system", "be brief"), Message("user", (TextPart("hi"),))),
        (Message("system", "be brief"), Message("user", (ImagePart("hi"),))),
        (Message("system", "be brief"), Message("user", "hi", "eva")),
        (Message("system", "be brief"), Message("user", "hi", tool_calls=(ToolCall("a", "b", "c"),))),
        (Message("system", "be brief"), Message("user", "hi", tool_call_id="x")),
        (Message("system", "be briefhi"), Message("user", "")),
    ],
    "prompts": [("a",), ("a", "b"), ((1, 2),), ((1,), (2,)), ("ab",)],
    "max_tokens": [1, 2],
    "limit_name": ["max_completion_tokens"],
    "reasoning_effort": ["none", "high"],
    "sampling": [
        Sampling(temperature=0.0),
        Sampling(top_p=0.5),
        Sampling(top_k=1),
        Sampling(min_p=0.5),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=0.5),
        Sampling(repeat_penalty=0.5),
        Sampling(seed=1),
        Sampling(logit_bias=((1, 0.5),)),
    ],
    "stop": [("a",), ("a", "b"), ("b", "a"), ("ab",)],
    "n": [2],
    "stream": [True],
    "include_usage": [True],
    "tools": [(), (Tool("fan"),), (Tool("lamp", "d"),), (Tool("lamp", "", '{"a":1}'),), (Tool("lamp", strict=True),)],
    "tool_choice": [ToolChoice("none"), ToolChoice("required"), ToolChoice("function", "lamp")],
    "parallel_tool_calls": [False],
    "response_format": [
        None,
        ResponseFormat(),
        ResponseFormat("json_object"),
        ResponseFormat("json_schema", "t", "{}"),
        ResponseFormat("json_schema", "s", "[]"),
        ResponseFormat("json_schema", "s", "{}", True),
    ],
    "logprobs": [0, 1],
    "echo": [True],
    "suffix": ["", "z"],
    "dimensions": [8],
    "encoding_format": ["base64"],
    "user": ["eva"],
    "extra": ['{"a":1}', '{"a":2}'],
    "hints": [RoutingHints(tags=("a",)), RoutingHints(client="c"), RoutingHints(deadline_ms=5)],
}


def test_the_table_is_exhaustive() -> None:
    assert set(CHANGES) == set(Request.__struct_fields__)
    assert all(UNKEYED_FIELDS.values())


@pytest.mark.parametrize("field", Request.__struct_fields__)
def test_each_field_alone(field: str) -> None:
    """A covered field, changed alone, changes the key, each value to another one; an unkeyed field never does."""
    keys = {fingerprint(msgspec.structs.replace(BASE, **{field: value}), b"") for value in CHANGES[field]}
    if field in UNKEYED_FIELDS:
        assert keys == {fingerprint(BASE, b"")}
    else:
        assert len(keys - {fingerprint(BASE, b"")}) == len(CHANGES[field])


def test_the_preference_is_covered() -> None:
    preferences: list[Prefer | None] = [None, "prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]
    requests = [msgspec.structs.replace(BASE, hints=RoutingHints(prefer=preference)) for preference in preferences]
    assert len({fingerprint(request, b"") for request in requests}) == 5


def test_scopes_separate_entries() -> None:
    assert len({fingerprint(BASE, scope) for scope in (b"", b"a", b"b", b"ab")}) == 4
    assert len(fingerprint(BASE, b"")) == KEY_BYTES == 16


_ANY = chat_requests() | completion_requests()


@given(_ANY, _ANY)
def test_two_requests_share_a_key_only_if_their_covered_fields_are_equal(one: Request, other: Request) -> None:

    def covered(request: Request) -> Request:
        ignored = {"stream": False, "include_usage": False, "user": None, "hints": RoutingHints(request.hints.prefer)}
        return msgspec.structs.replace(request, **ignored)

    assert (fingerprint(one, b"") == fingerprint(other, b"")) is (repr(covered(one)) == repr(covered(other)))
    assert fingerprint(one, b"") == fingerprint(covered(one), b"")


@given(_ANY, st.data())
def test_taking_one_covered_field_from_another_request_changes_the_key(one: Request, data: st.DataObject) -> None:
    other = data.draw(_ANY)
    field = data.draw(st.sampled_from([name for name in Request.__struct_fields__ if name not in UNKEYED_FIELDS]))
    mixed = msgspec.structs.replace(one, **{field: getattr(other, field)})
    same = repr(getattr(one, field)) == repr(getattr(other, field))
    assert (fingerprint(one, b"x") == fingerprint(mixed, b"x")) is same
