"""Every text of a request is seen and may be changed; nothing else is."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.anthropic.request import parse_messages
from causeway_server.router.guard.detectors import find
from causeway_server.router.guard.facts import UNKNOWN, Detector, GuardFacts, facts_of
from causeway_server.router.guard.texts import has_unread, text_length, with_texts
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.completions import parse_completion
from causeway_server.router.openai.embeddings import parse_embedding
from causeway_server.router.types import Request, RoutingHints

MAIL = "anna@example.org"


def chat(**body: object) -> Request:
    return parse_chat(msgspec.json.encode({"model": "m", **body}), RoutingHints())


def user(content: object, **more: object) -> list[object]:
    return [{"role": "user", "content": content, **more}]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"to": "\\nanna@example.org"}'}}
DATA = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"data": "{MAIL}"}}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": f"mails {MAIL}", "parameters": {"type": "object"}}}
IN_PARAMETERS = {"type": "object", "properties": {"a": {"enum": [MAIL], "type": "string"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "title": MAIL}}}
CHATS = {
    "text": chat(messages=user(f"to {MAIL}")),
    "part": chat(messages=user([{"type": "text", "text": MAIL}])),
    "system": chat(messages=[{"role": "system", "content": MAIL}, *user("hi")]),
    "earlier answer": chat(messages=[*user("hi"), {"role": "assistant", "content": MAIL}, *user("and")]),
    "arguments": chat(messages=[*user("hi"), {"role": "assistant", "tool_calls": [CALL]}, *user("and")]),
    "arguments under any key": chat(messages=[*user("hi"), {"role": "assistant", "tool_calls": [DATA]}, *user("and")]),
    "name of a participant": chat(messages=user("hi", name=MAIL)),
    "tool": chat(messages=user("hi"), tools=[TOOL]),
    "tool's parameters": chat(
        messages=user("hi"),
        tools=[{"type": "function", "function": {"name": "f", "parameters": IN_PARAMETERS}}],
    ),
    "schema": chat(messages=user("hi"), response_format=SCHEMA),
    "stop": chat(messages=user("hi"), stop=[MAIL]),
    "user": chat(messages=user("hi"), user=MAIL),
    "passed on": chat(messages=user("hi"), metadata={"owner": {"data": MAIL}}),
    "passed on in a message": chat(
        messages=[*user("hi"), {"role": "assistant", "content": "a", "reasoning": MAIL}, *user("x")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("request_", CHATS.values(), ids=CHATS)
def test_every_text_is_seen_and_changed(request_: Request) -> None:
    assert facts_of(request_, Detector()) == GuardFacts(("email",), 1, 0)
    changed = with_texts(request_, lambda text: text.replace(MAIL, "nobody"))
    assert facts_of(changed, Detector()) == GuardFacts()
    assert MAIL not in str(msgspec.to_builtins(changed))


def test_prompts_and_inputs_are_texts() -> None:
    completion = parse_completion(
        b'{"model": "m", "prompt": ["a", "b anna@example.org"], "suffix": "1.2.3.9"}', RoutingHints()
    )
    vectors = parse_embedding(b'{"model": "m", "input": ["anna@example.org"]}', RoutingHints())
    assert facts_of(completion, Detector()) == GuardFacts(("email", "ip"), 2, 0)
    assert facts_of(vectors, Detector()) == GuardFacts(("email",), 1, 0)


def test_anthropic_requests_have_the_same_texts() -> None:
    body = {"model": "m", "max_tokens": 5, "system": MAIL, "messages": user("key AKIAIOSFODNN7EXAMPLE")}
    request, _ = parse_messages(msgspec.json.encode(body), RoutingHints())
    assert facts_of(request, Detector()) == GuardFacts(("email",), 1, 1)


def test_a_value_counts_once_wherever_it_is() -> None:
    request = chat(messages=[{"role": "system", "content": MAIL}, *user(f"{MAIL}, b@example.org, {MAIL}")])
    assert facts_of(request, Detector()) == GuardFacts(("email",), 2, 0)


def test_what_is_not_changed_stays_the_same_object() -> None:
    for request in CHATS.values():
        assert with_texts(request, str) == request
    plain = CHATS["text"]
    assert with_texts(plain, lambda text: text) is plain


def test_a_card_as_a_number_of_json_is_seen() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"card": 4111111111111111, "n": 3}'}}
    request = chat(messages=[*user("hi"), {"role": "assistant", "tool_calls": [call]}, *user("and")])
    assert facts_of(request, Detector()).classes == ("card",)


def test_parts_and_token_ids_cannot_be_read() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    ids = parse_completion(b'{"model": "m", "prompt": [1, 2, 3]}', RoutingHints())
    assert has_unread(chat(messages=user([image])))
    assert has_unread(ids)
    assert not has_unread(CHATS["part"])
    assert (UNKNOWN.pii, UNKNOWN.secrets) == (1, 1)
    assert "name" in UNKNOWN.classes


def test_the_length_of_all_texts() -> None:
    assert text_length(chat(messages=user("hello"))) == 5


def test_a_detector_without_time_raises() -> None:
    with pytest.raises(TimeoutError):
        facts_of(CHATS["text"], Detector(expired=lambda: True))
    assert find(MAIL)
