"""Messages of the gRPC service ↔ requests and answers, as the HTTP API understands them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grpc import StatusCode

import causeway_server.router.errors
from causeway_server.cloud_pool.grpc_api.answer_output import Outbox, OutputEncoder
from causeway_server.cloud_pool.grpc_api.calls import status_code, trailing_metadata
from causeway_server.cloud_pool.grpc_api.messages import InputChunk
from causeway_server.cloud_pool.grpc_api.request_input import RequestInput
from causeway_server.router.errors import (
    CausewayError,
    ClientGone,
    InvalidRequest,
    MissingField,
    RateLimited,
    StreamBroken,
)
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.completions import parse_completion
from causeway_server.router.types import (
    AudioPart,
    Chunk,
    ImagePart,
    RoutingHints,
    TextPart,
    TokenAlternative,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from tests.check.protos import PROTOS, compiled
from tests.check.sources import ROOT

CHAT = {"model": "large", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "balance", "parameters": {"type": "object", "maxProperties": 2}}}


def body_of(request: dict[str, Any], *chunks: str | dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The body that a call's chunks stand for, and the Request that it becomes."""
    collected = RequestInput()
    collected.add(InputChunk(request=request))
    for chunk in chunks:
        collected.add(InputChunk(text=chunk) if isinstance(chunk, str) else InputChunk(**chunk))
    body, parse = collected.body()
    return msgspec.json.decode(body), parse(body, RoutingHints())


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_the_compiled_form_is_that_of_the_published_proto(proto: Path) -> None:
    """`python -m tests.check.protos` writes it again."""
    assert compiled(proto) == proto.with_suffix(".binpb").read_bytes()


@pytest.mark.slow
def test_a_gateway_without_the_key_imports_none_of_it() -> None:
    program = "import sys, causeway_server.cloud_pool.app; "
    program += "print([name for name in sys.modules if 'grpc_' in name or 'http.' in name])"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "causeway_server.cloud_pool.http.config" in loaded.stdout  # which has the key
    assert [name for name in ("grpc_api.server", "grpc_health.v1", "grpc_reflection.v1") if name in loaded.stdout] == []


def test_a_chat_is_the_request_that_the_http_body_would_be() -> None:
    parameters = {"tools": [TOOL], "logprobs": True, "top_logprobs": 2, "logit_bias": {"7": 1.5}, "n": 2}
    typed = {"max_tokens": 16, "temperature": 0.0, "top_p": 0.25, "seed": 2**53 + 1, "stop": ["a", "b"]}
    call = {"id": "c1", "type": "function", "function": {"name": "balance", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "fields": {"tool_calls": [call]}},
        {"role": "tool", "content": "12", "fields": {"tool_call_id": "c1"}},
        {"role": "user", "fields": {"content": [{"type": "text", "text": "And now?"}]}},
    ]
    body, request = body_of({"model": "large", "messages": messages, "parameters": parameters, **typed})
    flat = [{**message.pop("fields", {}), **message} for message in msgspec.to_builtins(messages)]
    assert body == {"model": "large", "messages": flat, **parameters, **typed, "stream": True}
    assert request == parse_chat(msgspec.json.encode(body), RoutingHints())
    assert (request.sampling.seed, request.logprobs, request.n, request.stream) == (2**53 + 1, 2, 2, True)


def test_a_prompt_makes_a_completion() -> None:
    _, request = body_of({"model": "large", "prompt": "Once", "parameters": {"echo": True}})
    assert request == parse_completion(
        b'{"model": "large", "prompt": "Once", "echo": true, "stream": true}', RoutingHints()
    )
    _, tokens = body_of({"model": "large", "parameters": {"prompt": [1, 2]}})
    assert tokens.prompts == ((1, 2),)


def test_further_chunks_continue_the_last_message_or_the_prompt() -> None:
    assert body_of(CHAT, " th", "ere")[1].messages[-1].content == "Hi there"
    assert body_of({"model": "m", "messages": [{"role": "user"}]}, "Hi")[1].messages[0].content == "Hi"
    assert body_of({"model": "m", "prompt": ""}, "Once")[1].prompts == ("Once",)


def test_audio_clips_and_images_in_chunks_are_parts_of_the_last_message() -> None:
    chunks: list[str | dict[str, Any]] = [
        " th",
        "ere",
        {"audio": {"format": "wav", "data": b"RI"}},
        {"audio": {"data": b"FF"}},
        {"image": {"media_type": "image/png", "data": b"P"}},
        {"image": {"media_type": "image/png", "data": b"Q"}},
        "?",
    ]
    assert body_of(CHAT, *chunks)[1].messages[0].content == (
        TextPart("Hi there"),
        AudioPart("UklGRg==", "wav"),
        ImagePart("data:image/png;base64,UA=="),
        ImagePart("data:image/png;base64,UQ=="),
        TextPart("?"),
    )


@pytest.mark.parametrize(
    ("request_fields", "part", "param"),
    [
        (CHAT, {"audio": {"data": b"R"}}, "audio.format"),
        (CHAT, {"image": {"data": b"P"}}, "image.media_type"),
        (CHAT, {"image": {"data": b"P", "media_type": "text/html"}}, "image.media_type"),
        ({"model": "m", "prompt": "Once"}, {"audio": {"format": "wav"}}, "audio"),
        (
            {"model": "m", "messages": [{"role": "user", "fields": {"content": []}}]},
            {"audio": {"format": "a"}},
            "audio",
        ),
    ],
)
def test_a_part_that_is_none_is_refused(request_fields: dict[str, Any], part: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body_of(request_fields, part)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("request_fields", "texts", "param"),
    [
        ({**CHAT, "parameters": {"stream": False}}, (), "parameters.stream"),
        ({**CHAT, "parameters": {"messages": []}}, (), "parameters.messages"),
        ({**CHAT, "max_tokens": 1, "parameters": {"max_tokens": 1}}, (), "max_tokens"),
        ({"model": "m", "messages": [{"role": "user", "fields": {"role": "system"}}]}, (), "messages[0].role"),
        ({**CHAT, "prompt": "Once"}, (), "prompt"),
        ({**CHAT, "temperature": float("nan")}, (), "temperature"),
        ({**CHAT, "parameters": {"tools": [float("inf")]}}, (), "parameters.tools[0]"),
        ({"model": "m"}, ("Hi",), "text"),
        ({"model": "m", "messages": [{"role": "user", "fields": {"content": []}}]}, ("Hi",), "text"),
        ({**CHAT, "temperature": 9.0}, (), "temperature"),
        ({**CHAT, "parameters": {"temprature": 1}}, (), "temprature"),
        ({"model": "m"}, (), "messages"),
    ],
)
def test_what_says_no_request_is_refused(request_fields: dict[str, Any], texts: tuple[str, ...], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body_of(request_fields, *texts)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("before", "chunk"),
    [((), {"text": "Hi"}), ((), {}), (({"request": CHAT},), {"request": CHAT}), (({"request": CHAT},), {})],
    ids=["text first", "empty", "two requests", "empty later"],
)
def test_chunks_out_of_order_are_refused(before: tuple[dict[str, Any], ...], chunk: dict[str, Any]) -> None:
    collected = RequestInput()
    for one in before:
        collected.add(InputChunk(**one))
    with pytest.raises(InvalidRequest, match="The first InputChunk of a call must have `request`"):
        collected.add(InputChunk(**chunk))


def test_an_input_without_chunks_is_refused() -> None:
    with pytest.raises(MissingField):
        RequestInput().body()


def test_each_part_of_a_chunk_has_its_field() -> None:
    top = (TokenAlternative("b", -2.0, (98,)),)
    chunk = Chunk(
        "a",
        index=1,
        tool_calls=(ToolCallDelta(0, '{"a"', id="c1", name="balance"), ToolCallDelta(0, ": 1}")),
        logprobs=(TokenLogprob("a", -0.5, (97,), top), TokenLogprob("?", float("-inf"))),
        finish_reason="length",
        refusal="",
        reasoning="hm",
    )
    delta = OutputEncoder(2).chunk(chunk).delta
    assert (delta.index, delta.text, delta.finish_reason, delta.reasoning) == (1, "a", "length", "hm")
    assert delta.HasField("refusal")
    assert [(c.id, c.name, c.arguments) for c in delta.tool_calls] == [("c1", "balance", '{"a"'), ("", "", ": 1}")]
    first, second = delta.logprobs
    assert (first.token, first.logprob, first.bytes, first.top[0].token) == ("a", -0.5, b"a", "b")
    assert (second.HasField("bytes"), second.logprob) == (False, float("-inf"))


def test_an_answer_ends_with_its_usage_once_each_choice_has_ended() -> None:
    encoder = OutputEncoder(2)
    encoder.chunk(Chunk("a", tokens=3, finish_reason="stop"))
    with pytest.raises(StreamBroken):
        encoder.end()
    encoder.chunk(Chunk("b", index=1, tokens=4, finish_reason="stop"))
    assert encoder.finished
    assert encoder.end().usage.completion_tokens == 7  # our own count
    assert encoder.chunk(Chunk(usage=Usage(5, 6, 1))) is None
    usage = encoder.end().usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 6, 1)


class HeldCall:
    """Takes messages while it is not held."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.free = asyncio.Event()

    async def write(self, message: Any) -> None:
        self.taken.append(message)
        await self.free.wait()


async def test_texts_that_wait_leave_together_and_nothing_else_does() -> None:
    call = HeldCall()
    outbox, encoder = Outbox(call, stalled_s=60.0), OutputEncoder(2)
    chunks = [Chunk("a"), Chunk("b"), Chunk("c"), Chunk("d", index=1), Chunk("e", index=1)]
    chunks += [Chunk(reasoning="hm"), Chunk("f"), Chunk("g", finish_reason="stop")]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.run())
        for chunk in chunks:
            await outbox.put(encoder.chunk(chunk))
            await asyncio.sleep(0)  # the first one is under way from here on
        call.free.set()
        await outbox.flush()
        outbox.close()
    deltas = [message.delta for message in call.taken]
    assert [(delta.index, delta.text or delta.reasoning) for delta in deltas] == [
        (0, "a"), (0, "bc"), (1, "de"), (0, "hm"), (0, "f"), (0, "g")
    ]  # fmt: skip
    assert deltas[-1].finish_reason == "stop"


async def test_texts_that_wait_are_bounded() -> None:
    call = HeldCall()
    outbox = Outbox(call, stalled_s=0.05)

    async def fill() -> None:
        while True:
            await outbox.put(OutputEncoder(1).chunk(Chunk("x" * 100)))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.run())
        with pytest.raises(ClientGone):
            await fill()
        call.free.set()
        outbox.close()
    assert sum(len(message.delta.text) for message in call.taken) < 16 * 1024


def test_each_error_has_a_status() -> None:
    errors = {
        one
        for one in vars(causeway_server.router.errors).values()
        if isinstance(one, type) and issubclass(one, CausewayError)
    }
    by_code = {one.code: status_code(one("")) for one in errors}
    assert by_code["invalid_value"] == StatusCode.INVALID_ARGUMENT
    assert by_code["invalid_api_key"] == StatusCode.UNAUTHENTICATED
    assert by_code["body_too_large"] == by_code["queue_full"] == StatusCode.RESOURCE_EXHAUSTED
    assert by_code["deadline_exceeded"] == StatusCode.DEADLINE_EXCEEDED
    assert by_code["stream_broken"] == by_code["draining"] == StatusCode.UNAVAILABLE
    assert {code for code, status in by_code.items() if status is StatusCode.INTERNAL} == {
        "internal_error", "invalid_config", "invalid_policy", "record_unreadable"
    }  # fmt: skip


def test_the_trailing_metadata_is_what_http_says() -> None:
    trailing = dict(trailing_metadata(RateLimited("Later.", retry_after_s=1.5), "r1"))
    assert msgspec.json.decode(trailing.pop("x-causeway-error-bin"))["error"]["message"] == "Later."
    assert trailing == {"x-request-id": "r1", "x-causeway-error-code": "rate_limit_exceeded", "retry-after": "2"}
