"""A stream that a cloud answers, in callbacks: the same bytes, record and error as from the general path.

The cloud sends the pieces of a script; each is a case of the table. `direct`: whether no task had to go on with it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from aiohttp import web

from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.serving.direct import Context, DirectStream
from causeway_server.router.anthropic.replies import MESSAGES
from causeway_server.router.serving.responses import TextExchange
from causeway_server.router.types import DecisionRecord
from tests.waiting import until

from ..device import Answer, Device, hasty, running
from ..scripted import ScriptedCloud
from .test_direct import _OWN, Watched, chat, client, stripped

CUT, STALL = b"cut", b"stall"  # steps of a script that are not sent
_TURNS = 6  # of the event loop, in which a piece arrives by itself
Script = Sequence[bytes]


def event(delta: object, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    document = {"id": "x", "object": "chat.completion.chunk", "choices": [choice], **more}
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def texts(*found: str) -> list[bytes]:
    return [event({"content": text}) for text in found]


ROLE = event({"role": "assistant", "content": ""})
STOP = event({}, "stop")
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
DONE = b"data: [DONE]\n\n"
END = STOP + USAGE + DONE
WORDS = texts("a", "ü", "€ \U0001f600", '"\\', "b", "c")
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}


class Case(NamedTuple):
    script: Script
    direct: bool = True
    body: dict[str, Any] = {}  # noqa: RUF012  # never modified


CASES = {
    "plain": Case([ROLE, *WORDS, END]),
    "usage asked": Case([ROLE, *WORDS, END], body={"stream_options": {"include_usage": True}}),
    "one piece": Case([ROLE + b"".join(WORDS) + END]),
    "ends apart": Case([*WORDS, STOP, USAGE, DONE]),
    "several events at once": Case([ROLE + WORDS[0], b"".join(WORDS[1:4]), b"".join(WORDS[4:]), END]),
    "cut within events": Case([b"".join([ROLE, *WORDS, END])[at : at + 7] for at in range(0, 1200, 7)]),
    "cut within a letter": Case([WORDS[0], WORDS[2][:-40], WORDS[2][-40:], WORDS[1][:60], WORDS[1][60:], END]),
    "CRLF": Case([piece.replace(b"\n", b"\r\n") for piece in (ROLE, *WORDS, END)]),
    "CR": Case([piece.replace(b"\n", b"\r") for piece in (ROLE, *WORDS, END)]),
    "comments": Case([b": hello\n\n", ROLE, WORDS[0], b": ping\n\n", WORDS[1], b"event: x\n" + WORDS[3], END]),
    "mark": Case([b"\xef\xbb\xbf" + ROLE, *WORDS, END]),
    "ids change": Case([event({"content": "x"}, id=f"id-{number}", created=number) for number in range(9)] + [END]),
    "a large event": Case([WORDS[0], event({"content": "word " * 60_000}), WORDS[1], END]),
    "empty texts": Case([ROLE, WORDS[0], *texts("", ""), WORDS[1], END]),
    "no usage": Case([*WORDS, STOP, DONE]),
    "no usage, though asked": Case([*WORDS, STOP, DONE], body={"stream_options": {"include_usage": True}}),
    "usage in each event": Case(
        [event({"content": "x"}, usage={"prompt_tokens": 7, "completion_tokens": n}) for n in (1, 2)] + [STOP, DONE]
    ),
    "no DONE": Case([*WORDS, STOP + USAGE], direct=False),
    "DONE without an end": Case([*WORDS, DONE]),
    "ends twice": Case([*WORDS, STOP, STOP, USAGE, DONE]),
    "goes on after its end": Case([*WORDS, STOP, *WORDS, event({}, "length"), USAGE, DONE]),
    "reasoning": Case([event({"reasoning_content": "hm"}), *WORDS, END]),
    "refusal": Case([event({"refusal": "no"}), END]),
    "calls": Case(
        [
            event({"tool_calls": [CALL]}),
            event({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
            event({}, "tool_calls"),
            USAGE + DONE,
        ],
        body={"tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    "a call between texts": Case([*WORDS, event({"tool_calls": [CALL]}), *WORDS, END]),
    "bytes after DONE": Case([*WORDS, END + WORDS[0], WORDS[1]]),
    "another choice": Case([*WORDS, WORDS[0].replace(b'"index": 0', b'"index": 1'), END]),
    "a page": Case([b"<html><body>Hello</body></html>"], direct=False),
    "nothing": Case([], direct=False),
    "a document": Case([json.dumps({"choices": [{"message": {"content": "a"}}]}).encode()], direct=False),
    "an error at first": Case([b'data: {"error":{"message":"m","code":"c"}}\n\n'], direct=False),
    "an error later": Case([*WORDS, b'data: {"error":{"message":"m","code":"c"}}\n\n'], direct=False),
    "text and an error at once": Case([WORDS[0] + b'data: {"error":{"message":"m"}}\n\n'], direct=False),
    "nonsense at first": Case([b"data: {nonsense\n\n"], direct=False),
    "nonsense later": Case([*WORDS, b"data: {nonsense\n\n", END], direct=False),
    "bad UTF-8": Case([*WORDS, WORDS[0].replace(b'"a"', b'"\xff"'), END], direct=False),
    "no end": Case([*WORDS], direct=False),
    "no end, but an empty piece": Case([*WORDS, b""], direct=False),
    "a character reference": Case([*WORDS, event({"content": "\x7f\u2028"}), END]),
    "broken off at first": Case([CUT], direct=False),
    "broken off after the role": Case([ROLE, CUT], direct=False),
    "broken off later": Case([*WORDS, CUT], direct=False),
    "broken off within an event": Case([*WORDS, WORDS[0][:30], CUT], direct=False),
    "broken off after the end of the choice": Case([*WORDS, STOP, CUT], direct=False),
    "broken off before the end of the body": Case([*WORDS, END, CUT]),
}
STALLS = {
    "before the first token": [ROLE, STALL],
    "between two tokens": [*WORDS, STALL],
    "within an event": [*WORDS, WORDS[0][:30], STALL],
    "before the head": [b"", STALL],
}


class StreamingCloud(ScriptedCloud):
    """Sends the pieces of a script, each when the one before has arrived."""

    script: Script = ()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        if not script:
            return await super()._stream(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.headers})
        for piece in script:
            if piece is STALL:
                await asyncio.Event().wait()
            elif piece is CUT:
                assert request.transport is not None
                request.transport.abort()
                raise asyncio.CancelledError
            elif piece:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(piece)
            for _ in range(_TURNS if piece is not script[-1] else 0):  # the end follows the last one at once
                await asyncio.sleep(0)
        if not response.prepared:
            await response.prepare(request)
        return response


@asynccontextmanager
async def watched(device: Device, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[DirectStream]]:
    """Yield the streams with which a task went on."""
    handed: list[DirectStream] = []
    context = DirectStream.context

    def note(stream: DirectStream) -> Context:
        handed.append(stream)
        return context(stream)

    monkeypatch.setattr(DirectStream, "context", note)
    device.cloud.__class__ = StreamingCloud
    yield handed


async def twins(device: Device, script: Script, **body: Any) -> tuple[Answer, Answer]:
    """Return the answers to the same request on the general path, and in callbacks."""
    cloud, begun = device.cloud, Watched.of(device)
    assert isinstance(cloud, StreamingCloud)
    async with client(device) as one, client(device) as other:
        await chat(other, stream=True)
        cloud.script, begun.is_off = script or (b"",), True
        general = await chat(one, stream=True, **body)
        cloud.script, begun.is_off = (), False
        await chat(device, tags="cloud")  # leaves an idle connection to the cloud
        cloud.script = script or (b"",)
        before = len(begun.begun)
        direct = await chat(other, stream=True, **body)
        assert isinstance(begun.begun[before], DirectStream), "it was not direct"
        return general, direct


def normal(answer: Answer) -> bytes:
    """Return the body without its own id and time."""
    own = answer.headers["x-causeway-decision"].encode()
    return re.sub(rb'"created":\d+', b'"created":0', answer.body.replace(own, b"ID"))


async def assert_alike(device: Device, general: Answer, direct: Answer) -> DecisionRecord:
    """Check that two answers and their records differ in ids and times alone. Returns the record of the second."""
    assert direct.status == general.status
    own = [
        [(name, one) for name, one in each.headers.items() if name.lower() not in _OWN] for each in (general, direct)
    ]
    assert own[0] == own[1]
    assert normal(direct) == normal(general)
    records = [await device.record(one) for one in (general, direct)]
    plain = [stripped(msgspec.to_builtins(one)) for one in records]
    assert plain[0] == plain[1]
    return records[1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_stream_and_its_record_are_those_of_the_general_path(
    device: Device, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(device, monkeypatch) as handed:
        general, direct = await twins(device, case.script, **case.body)
        record = await assert_alike(device, general, direct)
        assert bool(handed) is not case.direct
        if case.direct:
            assert direct.done
            assert record.outcome.status == "ok"
        await until(lambda: device.cloud.running == 0)
        health = device.parts.clouds.first
        assert health is not None
        assert health.health.breaker.state(health.now()) == "closed"
        device.assert_nothing_leaks()


_OF_MESSAGES = (
    *("plain", "cut within events", "empty texts", "reasoning", "refusal", "calls", "a call between texts"),
    *("an error later", "nonsense at first", "no end", "broken off later"),
)


@pytest.mark.parametrize("name", _OF_MESSAGES)
async def test_the_stream_of_a_message_is_that_of_the_general_path(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call ends a block of text, so that the events of the next text are others."""
    taken, take = list[bytes](), TextExchange.take
    monkeypatch.setattr(TextExchange, "take", lambda *one: take(*one) and not taken.append(one[1]))
    async with watched(device, monkeypatch) as handed:
        general, direct = await twins(device, CASES[name].script, path=MESSAGES, max_tokens=9)
        await assert_alike(device, general, direct)
        assert bool(handed) is not CASES[name].direct
        assert taken or name != "plain"
        device.assert_nothing_leaks()


@pytest.mark.parametrize("script", STALLS.values(), ids=STALLS)
async def test_a_silent_cloud_is_given_up_in_time(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, policy=hasty("large")) as device, watched(device, monkeypatch) as handed:
        general, direct = await twins(device, script)
        record = await assert_alike(device, general, direct)
        assert len(handed) == 1
        assert record.outcome.attempts[0].error == "cloud_timeout"
        await until(lambda: device.cloud.running == 0)
        device.assert_nothing_leaks()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def framed(data: bytes, size: str = "%x", end: bytes = b"\r\n") -> bytes:
    return (size % len(data)).encode() + b"\r\n" + data + end


FRAMES = [framed(word) for word in WORDS]
BEGIN, REST = HEAD + framed(ROLE) + FRAMES[0] * 2, [*FRAMES, framed(END) + LAST]
INNER = WORDS[0] + b"\r\n" + FRAMES[1]  # a chunk in the text of a chunk
RAW = {
    "each by itself": ([BEGIN, *FRAMES, *REST], 2 * len(FRAMES) - 1),
    "cut": ([BEGIN, *(half for frame in FRAMES for half in (frame[:40], frame[40:])), *REST], 0),
    "cut before its end": ([BEGIN, FRAMES[0], *(half for one in FRAMES for half in (one[:-1], one[-1:])), *REST], 0),
    "two at once": ([BEGIN, FRAMES[0], FRAMES[1] + FRAMES[2], *REST], 2),
    "two events in one": ([BEGIN, FRAMES[0], framed(WORDS[0] + WORDS[1]), *REST], 2),
    "an event in two": ([BEGIN, FRAMES[0], framed(WORDS[0][:20]) + framed(WORDS[0][20:]), *REST], 2),
    "other sizes": ([BEGIN, FRAMES[0], framed(WORDS[0], "%04X"), framed(WORDS[0], "%x;a=b"), *REST], 2),
    "a line feed alone": ([BEGIN, FRAMES[0], framed(WORDS[0], end=b"\n"), *REST], 0),
    "a chunk within a chunk": ([BEGIN, FRAMES[0], framed(INNER)[: -len(FRAMES[1]) - 2], FRAMES[1], b"\r\n", *REST], 0),
    "too short a size": ([BEGIN, FRAMES[0], b"3" + FRAMES[1][2:], *REST], 0),
    "no size": ([BEGIN, FRAMES[0], WORDS[0] + b"\r\n", *REST], 0),
    "no string": ([BEGIN, FRAMES[0], framed(WORDS[0].replace(b'"a"', b'"a"b"')), *REST], 0),
    "a line break in a string": ([BEGIN, FRAMES[0], framed(WORDS[0].replace(b'"a"', b'"a\n"')), *REST], 0),
    "closed between two": ([BEGIN, *FRAMES], 2),
    "closed within one": ([BEGIN, *FRAMES, FRAMES[0][:50]], 2),
}


class RawCloud(StreamingCloud):
    """Sends the pieces of its script as they are, the head of the answer included, and closes the connection."""

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if not self.script:
            return await super()._stream(request)
        assert request.transport is not None
        for piece in self.script:
            request.transport.write(piece)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        request.transport.close()
        raise asyncio.CancelledError


@pytest.mark.parametrize(("script", "least"), RAW.values(), ids=RAW)
async def test_chunks_are_passed_on_only_where_they_are_chunks(
    device: Device, script: Script, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`least`: how many chunks are passed on without their being parsed, at least."""
    taken: list[bytes] = []
    take = TextExchange.take

    def note(exchange: TextExchange, data: bytes) -> bool:
        is_taken = take(exchange, data)
        taken.extend([data] * is_taken)
        return is_taken

    monkeypatch.setattr(TextExchange, "take", note)
    async with watched(device, monkeypatch):
        device.cloud.__class__ = RawCloud
        general, direct = await twins(device, script)
        await assert_alike(device, general, direct)
        assert len(taken) >= least
        device.assert_nothing_leaks()


async def test_what_a_cloud_sends_after_its_end_reaches_no_client(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's connection may have the next answer by then."""
    taken: list[bytes] = []
    take = TextExchange.take

    def note(exchange: TextExchange, data: bytes) -> bool:
        taken.append(data)
        return take(exchange, data)

    monkeypatch.setattr(TextExchange, "take", note)
    async with watched(device, monkeypatch):
        device.cloud.__class__ = RawCloud
        late = framed(WORDS[0].replace(b'"a"', b'"late"'))
        general, direct = await twins(device, [BEGIN, *FRAMES, framed(END), *[late] * 5])
        await assert_alike(device, general, direct)
        await until(lambda: device.cloud.running == 0)
        assert taken
        assert not any(b"late" in data for data in taken)
        device.assert_nothing_leaks()


async def test_an_answer_without_its_usage_ends_in_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing follows the end of its only choice."""
    async with watched(device, monkeypatch):
        general, direct = await twins(device, [*WORDS, STOP, STALL])
        await assert_alike(device, general, direct)
        assert direct.done
        await until(lambda: device.cloud.running == 0)
        device.assert_nothing_leaks()


@pytest.mark.parametrize("status", [400, 401, 429, 503])
async def test_a_refusal_is_answered_by_the_next_target_or_the_same_error(
    device: Device, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(device, monkeypatch):
        for model in ("auto", "large"):
            answers = []
            begun = Watched.of(device)
            async with client(device) as one, client(device) as other:
                await chat(other, stream=True)
                await chat(device)
                for asking in (one, other):
                    begun.is_off = asking is one
                    device.cloud.status = status
                    answers.append(await chat(asking, stream=True, model=model))
                    device.cloud.status = 200
            assert len(begun.begun) >= 1
            assert answers[0].status == answers[1].status
            if answers[0].status == 200:
                await assert_alike(device, answers[0], answers[1])
            else:
                assert answers[0].json == answers[1].json
        device.assert_nothing_leaks()


async def test_a_server_without_stream_options_is_asked_again_without_them(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(StreamingCloud):
        async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
            if "stream_options" in body:
                error = {"message": "unknown field stream_options", "param": "stream_options"}
                return web.json_response({"error": error}, status=400)
            return await super()._answer(request, body)

    async with watched(device, monkeypatch) as handed:
        begun = Watched.of(device)
        async with client(device) as other:
            await chat(other)
            begun.begun.clear()
            device.cloud.__class__ = Older
            first, second = [await chat(other, stream=True) for _ in range(2)]
        assert (first.done, second.done) == (True, True)
        assert len(begun.begun) == 2
        assert len(handed) == 1
        assert ["stream_options" in body for body in device.cloud.bodies] == [False, True, False, False]


@pytest.mark.parametrize("script", [[b"", STALL], [ROLE, STALL], [*WORDS, STALL], [*WORDS, STOP, STALL]])
async def test_a_client_that_leaves_stops_the_work(
    device: Device, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    async with watched(device, monkeypatch):
        assert isinstance(device.cloud, StreamingCloud)
        for is_direct in (False, True):
            begun = Watched.of(device)
            async with client(device) as leaving:
                begun.is_off = True
                await chat(leaving)  # leaves an idle connection to the cloud
                begun.is_off = not is_direct
                device.cloud.script = script
                asking = asyncio.create_task(chat(leaving, stream=True))
                await until(lambda: device.cloud.running == 1)
                for _ in range(20 * _TURNS):
                    await asyncio.sleep(0)
                assert len(begun.begun) == is_direct
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: device.cloud.running == 0)
            await until(lambda: device.app.in_flight == 0)
            await until(lambda: device.newest().outcome.status == "cancelled")
            outcomes.append(stripped(msgspec.to_builtins(device.newest().outcome)))
            device.cloud.script = ()
            device.assert_nothing_leaks()
    assert outcomes[0] == outcomes[1]


async def test_a_client_that_reads_slowly_gets_all(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud's connection waits with it."""
    part = "word " * 20_000
    script = [*texts(*[part] * 120), END]
    async with watched(device, monkeypatch) as handed:
        assert isinstance(device.cloud, StreamingCloud)
        async with client(device) as asking:
            await chat(asking)
            device.cloud.script = script
            body = {"model": "large", "messages": [{"role": "user", "content": "x"}], "temperature": 1, "stream": True}
            body_headers = {"x-causeway-tags": "cloud"}
            async with asking.session.post("/v1/chat/completions", json=body, headers=body_headers) as response:
                await until(lambda: len(handed) == 1)
                assert device.cloud.running == 1
                data = await response.read()
        assert data.count(part.encode()) == 120
        assert data.endswith(DONE)
        device.assert_nothing_leaks()


async def test_a_stream_and_its_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that has begun with a comment goes on."""
    server = ServerConfig(port=0, heartbeat_s=0.1)
    async with running(tmp_path, server=server) as device, watched(device, monkeypatch) as handed:
        begun = Watched(device.parts.service, device.parts.clouds, 0.1)
        begun.begun, device.app.api.direct = [], begun
        await chat(device)
        begun.begun.clear()
        device.cloud.gate = asyncio.Event()
        async with device.session.post(
            "/v1/chat/completions",
            json={
                "model": "auto",
                "messages": [{"role": "user", "content": "hello"}],
                "temperature": 0.7,
                "stream": True,
            },
            headers={"x-causeway-tags": "cloud"},
        ) as response:
            assert await response.content.readany() == b": \n\n"
            device.cloud.gate.set()
            assert (await response.read()).endswith(DONE)
        assert len(begun.begun) == 1
        assert not handed


async def test_a_daemon_that_ends_tells_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    for is_direct in (False, True):
        server = ServerConfig(port=0, drain_s=0.05)
        async with running(tmp_path / str(is_direct), server=server) as device, watched(device, monkeypatch):
            begun = Watched.of(device)
            begun.is_off = True
            await chat(device)
            begun.is_off = not is_direct
            assert isinstance(device.cloud, StreamingCloud)
            device.cloud.script = [*WORDS, STALL]
            asking = asyncio.create_task(chat(device, stream=True))
            await until(lambda: device.cloud.running == 1)
            for _ in range(20 * _TURNS):
                await asyncio.sleep(0)
            assert len(begun.begun) == is_direct
            assert await device.app.drain() is False
            await device.app.close()
            answer = await asking
            bodies.append(normal(answer))
            outcome = device.newest().outcome
            assert (outcome.status, outcome.error, outcome.attempts[0].tokens) == ("error", "draining", len(WORDS))
            device.assert_nothing_leaks()
    assert bodies[0] == bodies[1]


async def test_metrics_and_spending_count_it_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(device, monkeypatch) as handed:
        _, direct = await twins(device, [*WORDS, END])
        record = await device.record(direct)
        assert not handed
    assert record.outcome.usd > 0.0
    lines = device.parts.metrics.text().decode().splitlines()
    assert 'causeway_edge_attempts_total{error="",state="done",target="large"} 4.0' in lines
    assert 'causeway_edge_request_seconds_count{route="cloud"} 4.0' in lines
    for name in ("server_request_duration", "server_time_to_first_token", "server_time_per_output_token"):
        assert [line[-3:] for line in lines if line.startswith(f"gen_ai_{name}_count")] == ["4.0"]
    assert device.parts.spend.current.usd_today == pytest.approx(4 * record.outcome.usd)


async def test_the_connection_serves_the_next_request(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were sent ahead are answered in order."""
    async with watched(device, monkeypatch) as handed:
        begun = Watched.of(device)
        reader, writer = await asyncio.open_connection("127.0.0.1", device.app.port)
        for number in range(4):
            document = {"model": "large", "messages": [{"role": "user", "content": f"{number}"}], "temperature": 0.7}
            body = json.dumps({**document, "stream": True}).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(4):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
        assert [one["messages"][0]["content"] for one in device.cloud.bodies] == list("0123")  # type: ignore[index]
        assert len(begun.begun) >= 3  # the first one may open a connection to the cloud
        assert not handed
        writer.close()


async def test_a_compressed_stream_is_read(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compressing(StreamingCloud):
        async def _stream(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            response.enable_compression(web.ContentCoding.gzip)
            await response.prepare(request)
            await response.write(b"".join([*WORDS, END]))
            return response

    async with watched(device, monkeypatch) as handed:
        device.cloud.__class__ = Compressing
        begun = Watched.of(device)
        async with client(device) as asking:
            await chat(asking)
            begun.begun.clear()
            answer = await chat(asking, stream=True)
        assert answer.text == 'aü€ \U0001f600"\\bc'
        assert (len(begun.begun), len(handed)) == (1, 1)


async def test_a_degraded_answer_of_a_gateway_says_so(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(device, monkeypatch) as handed:
        device.cloud.headers = {"x-causeway-tier": "b", "x-causeway-degraded": "true", "x-causeway-tier-reason": "full"}
        general, direct = await twins(device, [*WORDS, END])
        record = await assert_alike(device, general, direct)
        assert direct.headers["x-causeway-degraded"] == "true"
        assert record.outcome.attempts[0].detail == "answered by tier b: full"
        assert not handed
