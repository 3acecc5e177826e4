"""The SDK against a real server: what it sends, what it gives back, and what it does when things go wrong."""

from __future__ import annotations

import ast
import asyncio
import shutil
import ssl
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest

import causeway_sdk as sdk
from causeway_sdk import (
    Answer,
    AsyncCauseway,
    AsyncOutbox,
    Causeway,
    CausewayAPIError,
    CausewayConnectionBroken,
    CausewayError,
    CausewayTimeout,
    CausewayUnreachable,
    Choice,
    Chunk,
    Decision,
    Model,
    Outbox,
    ToolCall,
    Usage,
)
from causeway_sdk.connection import resolve_address

from .device import DONE, Device, Handler, answer_with, delta, event, raw, running, stream_of

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "edge_node" / "sdk" / "src").rglob("*.py"))
DECISION = Decision("dec_1", "edge", "small", "fast-path", "miss", "default@9f2c")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def message(content: str | None, **fields: object) -> dict[str, object]:
    said = {"role": "assistant", "content": content, **fields}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    return {"id": "a", "model": "small", "choices": [choice], "usage": USAGE}


class Caller(Protocol):
    """One of the two clients, called the same way."""

    async def call(self, name: str, *args: object, **asked: object) -> object: ...

    async def pieces(
        self, *args: object, stop_after: int = 0, **asked: object
    ) -> tuple[list[Chunk], Answer | None]: ...

    async def close(self) -> None: ...


class SyncCaller:
    def __init__(self, url: str, **options: object) -> None:
        self.client = Causeway(url, **options)  # type: ignore[arg-type]

    async def call(self, name: str, *args: object, **asked: object) -> object:
        return await asyncio.to_thread(getattr(self.client, name), *args, **asked)

    async def pieces(self, *args: object, stop_after: int = 0, **asked: object) -> tuple[list[Chunk], Answer | None]:
        def read() -> tuple[list[Chunk], Answer | None]:
            found = []
            with self.client.chat(*args, stream=True, **asked) as stream:  # type: ignore[call-overload]
                for piece in stream:
                    found.append(piece)
                    if len(found) == stop_after:
                        return found, None
                return found, stream.answer()

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        self.client.close()


class AsyncCaller:
    def __init__(self, url: str, **options: object) -> None:
        self.client = AsyncCauseway(url, **options)  # type: ignore[arg-type]

    async def call(self, name: str, *args: object, **asked: object) -> object:
        return await getattr(self.client, name)(*args, **asked)

    async def pieces(self, *args: object, stop_after: int = 0, **asked: object) -> tuple[list[Chunk], Answer | None]:
        found = []
        async with await self.client.chat(*args, stream=True, **asked) as stream:  # type: ignore[call-overload]
            async for piece in stream:
                found.append(piece)
                if len(found) == stop_after:
                    return found, None
            return found, await stream.answer()

    async def close(self) -> None:
        await self.client.close()


Connect = Callable[..., Awaitable[Caller]]


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    async with running() as started:
        yield started


@pytest.fixture(params=[SyncCaller, AsyncCaller], ids=["sync", "async"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    callers: list[Caller] = []

    async def make(url: str, **options: object) -> Caller:
        callers.append(request.param(url, **options))
        return callers[-1]

    yield make
    for caller in callers:
        await caller.close()


# --- what comes back -------------------------------------------------------------------------------------------------


async def test_a_whole_answer_is_typed_and_says_where_it_came_from(device: Device, connect: Connect) -> None:
    """Text, usage, model and the decision of the headers."""
    device.handler = answer_with(message("Alarm set."))
    answer = await (await connect(device.url)).call("chat", "wake me up at six")
    assert isinstance(answer, Answer)
    assert (answer.text, answer.finish_reason, answer.model) == ("Alarm set.", "stop", "small")
    assert answer.usage == Usage(3, 2, 5)
    assert answer.decision == DECISION
    assert device.requests == [{"model": "auto", "messages": [{"role": "user", "content": "wake me up at six"}]}]


async def test_a_stream_gives_pieces_and_their_sum(device: Device, connect: Connect) -> None:
    """Pieces come in order; the answer is what they add up to, with the usage of the last event."""
    usage = event({"id": "a", "model": "small", "choices": [], "usage": USAGE})
    device.handler = stream_of(delta("", role="assistant"), delta("Alarm"), delta(" set.", finish="stop"), usage, DONE)
    pieces, answer = await (await connect(device.url)).pieces("wake me up")
    assert [piece.text for piece in pieces] == ["", "Alarm", " set.", ""]
    assert answer is not None
    assert (answer.text, answer.finish_reason, answer.usage) == ("Alarm set.", "stop", Usage(3, 2, 5))
    assert answer.decision.route == "edge"
    assert answer.decision.first_token_ms is not None
    assert answer.total_ms >= answer.decision.first_token_ms
    assert device.requests[0]["stream"] is True
    assert device.requests[0]["stream_options"] == {"include_usage": True}


async def test_text_survives_any_chunking_and_any_separator(device: Device, connect: Connect) -> None:
    """Characters that Unicode calls line separators are text, and one event may come byte by byte."""
    text = "a\u2028b\x85c\x0bd\u2029é🙂"
    document = delta(text, finish="stop") + b": a comment\r\n\r\n" + DONE.replace(b"\n", b"\r\n")
    device.handler = stream_of(*(bytes([byte]) for byte in document))
    pieces, _ = await (await connect(device.url)).pieces("x")
    assert [piece.text for piece in pieces] == [text]


async def test_tool_calls_come_whole(device: Device, connect: Connect) -> None:
    """A tool call has its id, name and arguments."""
    call = {"id": "c1", "type": "function", "function": {"name": "set_alarm", "arguments": '{"at": 6}'}}
    device.handler = answer_with(message(None, tool_calls=[call]))
    answer = await (await connect(device.url)).call("chat", "x", tools=[{"type": "function"}])
    assert isinstance(answer, Answer)
    assert answer.tool_calls == (ToolCall("c1", "set_alarm", '{"at": 6}'),)
    assert answer.text == ""
    assert device.requests[0]["tools"] == [{"type": "function"}]


async def test_tool_calls_are_put_together_from_pieces(device: Device, connect: Connect) -> None:
    """Two calls, interleaved, are told apart by their index."""

    def part(index: int, arguments: str, **fields: object) -> bytes:
        name = {"name": fields.pop("name")} if "name" in fields else {}
        function = {"arguments": arguments, **name}
        return delta("", tool_calls=[{"index": index, "function": function, **fields}])

    device.handler = stream_of(
        part(0, "", id="c1", name="a"),
        part(1, "{", id="c2", name="b"),
        part(0, '{"x"'),
        part(1, "}"),
        part(0, ":1}"),
        delta("", finish="tool_calls"),
        DONE,
    )
    _, answer = await (await connect(device.url)).pieces("x")
    assert answer is not None
    assert answer.tool_calls == (ToolCall("c1", "a", '{"x":1}'), ToolCall("c2", "b", "{}"))
    assert answer.finish_reason == "tool_calls"


async def test_several_choices_keep_their_places(device: Device, connect: Connect) -> None:
    """With n=2 the pieces say whose they are."""
    device.handler = stream_of(delta("b", 1), delta("a", 0), delta("B", 1, "length"), delta("A", 0, "stop"), DONE)
    _, answer = await (await connect(device.url)).pieces("x", n=2)
    assert answer is not None
    assert answer.choices == (Choice("aA", (), "stop"), Choice("bB", (), "length"))


async def test_a_cached_degraded_answer_says_so(device: Device, connect: Connect) -> None:
    """Route, cache status and degradation are the headers'."""
    headers = {"x-causeway-route": "cache", "x-causeway-cache": "stale", "x-causeway-degraded": "true"}
    device.handler = answer_with(message("old"), headers=headers)
    answer = await (await connect(device.url)).call("chat", "x")
    assert isinstance(answer, Answer)
    assert (answer.decision.route, answer.decision.cache, answer.decision.degraded) == ("cache", "stale", True)


async def test_the_rest_of_the_surface(device: Device, connect: Connect) -> None:
    """Completions, embeddings, models, route and decisions: path, body and typed result."""
    caller = await connect(device.url)
    device.handler = answer_with({"choices": [{"index": 0, "text": " there", "finish_reason": "length"}]})
    answer = await caller.call("complete", "hello", max_tokens=1)
    assert isinstance(answer, Answer)
    assert (answer.text, answer.finish_reason) == (" there", "length")
    device.handler = answer_with({"data": [{"embedding": [1, 0.5]}, {"embedding": [0, 1]}], "model": "e"})
    vectors = await caller.call("embed", ["a", "b"])
    assert isinstance(vectors, sdk.Embeddings)
    assert vectors.vectors == ((1.0, 0.5), (0.0, 1.0))
    device.handler = answer_with({"data": [{"id": "small", "owned_by": "edge"}]})
    assert await caller.call("models") == [Model("small", "edge")]
    device.handler = answer_with({"rule": "fast-path"})
    assert await caller.call("route", "x", prefer="only_on_device") == {"rule": "fast-path"}
    assert await caller.call("decision", "dec_1") == {"rule": "fast-path"}
    assert device.paths == [
        "POST /v1/completions",
        "POST /v1/embeddings",
        "GET /v1/models",
        "POST /v1/route",
        "GET /v1/decisions/dec_1",
    ]
    assert device.requests[0] == {"model": "auto", "prompt": "hello", "max_tokens": 1}
    assert device.requests[1] == {"model": "auto", "input": ["a", "b"]}


# --- what is sent ----------------------------------------------------------------------------------------------------


async def test_wishes_travel_apart_from_openais_fields(device: Device, connect: Connect) -> None:
    """`prefer`, `tags` and what is left of the deadline are in the object `causeway`, the rest as OpenAI has it."""
    device.handler = answer_with(message("x"))
    caller = await connect(device.url, clock=lambda: 100.0)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    await caller.call(
        "chat",
        turns,
        model="large",
        prefer="only_on_device",
        tags=["private"],
        deadline_s=1.5,
        temperature=0.0,
        extra={"top_k": 5},
    )
    assert device.requests == [
        {
            "model": "large",
            "messages": turns,
            "temperature": 0.0,
            "top_k": 5,
            "causeway": {"prefer": "only_on_device", "tags": ["private"], "deadline_ms": 1500},
        }
    ]


async def test_the_key_is_a_bearer_token(device: Device, connect: Connect) -> None:
    """And without a key there is no such header."""
    device.handler = answer_with(message("x"))
    await (await connect(device.url, api_key="k")).call("chat", "x")
    await (await connect(device.url)).call("chat", "x")
    assert device.headers[0]["authorization"] == "Bearer k"
    assert "authorization" not in device.headers[1]


async def test_url_and_key_may_come_from_the_environment(
    device: Device, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OpenAI base_url will do, and a proxy in the environment is not asked: this device was meant."""
    monkeypatch.setenv("CAUSEWAY_URL", f"{device.url}/v1")
    monkeypatch.setenv("CAUSEWAY_API_KEY", "from-env")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    device.handler = answer_with(message("x"))
    await (await connect("")).call("chat", "x")
    assert device.paths == ["POST /v1/chat/completions"]
    assert device.headers[0]["authorization"] == "Bearer from-env"


async def test_a_unix_socket_serves_as_well(tmp_path: Path, connect: Connect) -> None:
    """`unix://` and a path."""
    async with running(tmp_path / "edge.sock") as device:
        device.handler = stream_of(delta("hi", finish="stop"), DONE)
        pieces, _ = await (await connect(device.url)).pieces("x")
        assert [piece.text for piece in pieces] == ["hi"]


# --- when it goes wrong ----------------------------------------------------------------------------------------------

REFUSAL = {
    "error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded", "param": "m"}
}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_keeps_all_that_the_device_said(device: Device, connect: Connect, stream: bool) -> None:
    """Status, type, code, param, Retry-After and the decision, for whole answers and for streams."""
    device.handler = answer_with(REFUSAL, status=400, headers={"retry-after": "7"})
    with pytest.raises(CausewayAPIError, match="too long") as caught:
        await (await connect(device.url)).call("chat", "x", stream=stream)
    error = caught.value
    assert (error.status, error.type, error.code, error.param) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "m",
    )
    assert error.retry_after_s == 7.0
    assert error.decision == DECISION


@pytest.mark.parametrize("handler", [raw(b"<html>Bad gateway</html>", 502), raw(b"[]", 502), raw(b"\xff", 502)])
async def test_a_strangers_error_page_is_an_api_error_too(device: Device, connect: Connect, handler: Handler) -> None:
    """Whatever stands between us and the device may answer in its own way."""
    device.handler = handler
    with pytest.raises(CausewayAPIError, match="HTTP 502"):
        await (await connect(device.url)).call("chat", "x")


@pytest.mark.parametrize("status", [200, 302])
async def test_a_portals_page_is_not_an_answer(device: Device, connect: Connect, status: int) -> None:
    device.handler = raw(b"<html>Log in</html>", status)
    caller = await connect(device.url)
    for name, *arguments in (("chat", "x"), ("submit", "x"), ("job", "job_1"), ("models",), ("embed", "x")):
        with pytest.raises(CausewayAPIError, match=f"HTTP {status}: <html>Log in"):
            await caller.call(name, *arguments)


async def test_an_error_in_mid_stream_is_raised_where_it_comes(device: Device, connect: Connect) -> None:
    """The pieces before it were given; the error has its type and code."""
    broken = {"error": {"message": "the engine died", "type": "backend_error", "code": "engine_crashed"}}
    device.handler = stream_of(delta("half"), event(broken), DONE)
    with pytest.raises(CausewayAPIError, match="the engine died") as caught:
        await (await connect(device.url)).pieces("x")
    assert (caught.value.code, caught.value.status) == ("engine_crashed", 200)


@pytest.mark.parametrize(
    "handler",
    [stream_of(delta("half"), end="drop"), stream_of(delta("half"), end="done"), stream_of(end="drop")],
    ids=["dropped", "ended without [DONE]", "dropped at once"],
)
async def test_half_an_answer_is_never_a_whole_one(device: Device, connect: Connect, handler: Handler) -> None:
    """A stream that ends before its end is an error."""
    device.handler = handler
    with pytest.raises(CausewayConnectionBroken):
        await (await connect(device.url)).pieces("x")


@pytest.mark.slow
async def test_a_stall_ends_in_a_timeout(device: Device, connect: Connect) -> None:
    """Neither a silent server nor one that stops in mid-answer holds a caller longer than it said."""
    caller = await connect(device.url, timeout_s=1.0)  # to connect takes no second, even on a busy machine
    for handler in (stream_of(end="stall"), stream_of(delta("half"), end="stall")):
        device.handler = handler
        with pytest.raises(CausewayTimeout):
            await caller.pieces("x")


async def test_a_drip_ends_at_the_deadline(device: Device, connect: Connect) -> None:
    """Each piece comes in time, all of them together do not."""
    ticks = iter(range(0, 1000, 3))
    device.handler = stream_of(*(delta("x") for _ in range(50)), DONE)
    with pytest.raises(CausewayTimeout, match="longer than its deadline of 5 s"):
        await (await connect(device.url, clock=lambda: float(next(ticks)))).pieces("x", deadline_s=5.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "unix:///nonexistent/edge.sock"])
async def test_an_unreachable_device_is_named(connect: Connect, url: str) -> None:
    """The error names the address."""
    with pytest.raises(CausewayUnreachable, match=r"127\.0\.0\.1:9|edge\.sock"):
        await (await connect(url)).call("chat", "x")


async def test_an_option_that_was_removed_is_refused_before_anything_is_sent(device: Device, connect: Connect) -> None:
    client = await connect(device.url)
    with pytest.raises(TypeError, match="`resume` was removed"):
        await client.call("chat", "x", resume="token")
    assert device.requests == []


@pytest.mark.parametrize("url", ["garbage", "ftp://device", "http://", "unix://"])
async def test_a_malformed_url_is_said_before_anything_is_sent(connect: Connect, url: str) -> None:
    with pytest.raises(CausewayError, match="is not the URL of a device"):
        await connect(url)


async def test_a_key_with_a_line_break_is_said_before_anything_is_sent(device: Device, connect: Connect) -> None:
    with pytest.raises(CausewayError, match="The API key has a line break"):
        await connect(device.url, api_key="secret\n")


async def test_an_id_stays_one_segment_of_the_path(device: Device, connect: Connect) -> None:
    device.handler = answer_with({"id": "x", "data": []})
    caller = await connect(device.url)
    for method in ("decision", "job", "purge"):
        await caller.call(method, "../models")
    await caller.call("jobs", after="x&limit=1")
    assert device.paths == [
        "GET /v1/decisions/../models",
        "GET /v1/jobs/../models",
        "POST /v1/jobs/../models/purge",
        "GET /v1/jobs",
    ]


async def test_leaving_a_stream_stops_the_work(device: Device, connect: Connect) -> None:
    """The server sees the client go, in the middle of the answer."""
    device.handler = stream_of(delta("a"), delta("b"), end="stall")
    pieces, _ = await (await connect(device.url)).pieces("x", stop_after=1)
    assert len(pieces) == 1
    await asyncio.wait_for(device.left.wait(), 60)


async def test_cancelling_a_task_stops_the_work(device: Device) -> None:
    """A cancelled await closes the connection too."""
    device.handler = stream_of(delta("a"), end="stall")
    async with AsyncCauseway(device.url) as causeway:
        seen = asyncio.Event()

        async def read() -> None:
            async with await causeway.chat("x", stream=True) as stream:
                async for _ in stream:
                    seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(device.left.wait(), 60)


# --- trying again ----------------------------------------------------------------------------------------------------


class FakeTime:
    """A clock that only `sleep` moves, for both kinds of client."""

    def __init__(self, kind: object) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.sleep = self._async_sleep if kind is AsyncCaller else self._sync_sleep

    def clock(self) -> float:
        return self.now

    def _sync_sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def _async_sleep(self, seconds: float) -> None:
        self._sync_sleep(seconds)


@pytest.fixture
def time_(request: pytest.FixtureRequest) -> FakeTime:
    kind = request.node.callspec.params["connect"]
    return FakeTime(kind)


def busy_then_well(busy: int, status: int = 429, retry_after: str | None = "2") -> Handler:
    left = iter([answer_with(REFUSAL, status, {"retry-after": retry_after} if retry_after else {})] * busy)
    well = answer_with(message("at last"))

    async def handler(request: object) -> object:
        return await next(left, well)(request)  # type: ignore[arg-type]

    return handler  # type: ignore[return-value]


@pytest.mark.parametrize("status", [429, 503])
async def test_retries_wait_as_long_as_the_device_says(
    device: Device, connect: Connect, time_: FakeTime, status: int
) -> None:
    """With `retries`, a request is repeated after the Retry-After of a busy device."""
    device.handler = busy_then_well(2, status)
    caller = await connect(device.url, retries=2, clock=time_.clock, sleep=time_.sleep)
    answer = await caller.call("chat", "x", deadline_s=10.0)
    assert isinstance(answer, Answer)
    assert answer.text == "at last"
    assert time_.waits == [2.0, 2.0]
    deadlines = [body["causeway"] for body in device.requests]
    assert deadlines == [{"deadline_ms": 10000}, {"deadline_ms": 8000}, {"deadline_ms": 6000}]


@pytest.mark.parametrize(
    ("busy", "status", "retry_after", "retries", "deadline_s", "asked"),
    [
        (1, 429, "2", 0, None, 1),
        (2, 429, "2", 1, None, 2),
        (1, 429, None, 5, None, 1),
        (1, 429, "Wed, 21 Oct 2026 07:28:00 GMT", 5, None, 1),
        (1, 500, "2", 5, None, 1),
        (1, 400, "2", 5, None, 1),
        (1, 429, "2", 5, 2.0, 1),
    ],
    ids=["not asked for", "too often", "no word when", "a date", "500", "400", "past the deadline"],
)
async def test_nothing_else_is_tried_again(
    device: Device,
    connect: Connect,
    time_: FakeTime,
    busy: int,
    status: int,
    retry_after: str | None,
    retries: int,
    deadline_s: float | None,
    asked: int,
) -> None:
    """Only 429 and 503, only as often as asked, only when the device said when, and never past the deadline."""
    device.handler = busy_then_well(busy, status, retry_after)
    caller = await connect(device.url, retries=retries, clock=time_.clock, sleep=time_.sleep)
    with pytest.raises(CausewayAPIError):
        await caller.call("chat", "x", deadline_s=deadline_s)
    assert (len(device.requests), len(time_.waits)) == (asked, asked - 1)


# --- by itself -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_its_builds_write_the_sync_client(tmp_path: Path) -> None:
    """A checkout without `_sync` gives an sdist, and the sdist a wheel, that holds the sync client and outbox."""
    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns("_sync", "*.egg-info", "build", "__pycache__")
    shutil.copytree(ROOT / "edge_node" / "sdk", checkout, ignore=left_out)
    with tarfile.open(tmp_path / built(checkout, "sdist", tmp_path)) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    shutil.rmtree(unpacked / "src" / "causeway_sdk" / "_sync")
    with zipfile.ZipFile(tmp_path / built(unpacked, "wheel", tmp_path)) as wheel:
        classes = {
            node.name
            for module in ("client", "outbox")
            for node in ast.parse(wheel.read(f"causeway_sdk/_sync/{module}.py")).body
            if isinstance(node, ast.ClassDef)
        }
        assert "causeway_sdk/py.typed" in wheel.namelist()
    assert classes == {"Causeway", "Stream", "Outbox"}


def built(folder: Path, kind: str, target: Path) -> str:
    """Build a distribution into `target` with the build backend of this environment; return its file name."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_it_needs_httpx_alone_and_parses_on_python_39(path: Path) -> None:
    """The SDK imports the standard library, itself and httpx, and nothing of the other packages."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names <= {"httpx", "typing_extensions"}


def test_everything_public_is_documented() -> None:
    """Each exported name, and each public method of the clients, has a docstring."""
    public = [getattr(sdk, name) for name in sdk.__all__ if isinstance(getattr(sdk, name), type)]
    methods = [
        method
        for client in (Causeway, AsyncCauseway, Outbox, AsyncOutbox)
        for name, method in vars(client).items()
        if callable(method) and not name.startswith("_")
    ]
    assert [one.__qualname__ for one in (*public, *methods) if not one.__doc__] == []


def test_only_https_loads_and_checks_the_certificates_of_the_system() -> None:
    """Loading them takes 20 ms; what does not load them trusts none."""
    assert resolve_address("https://device.example", "", 1.0, 1.0).certificates() is True
    plain = resolve_address("http://127.0.0.1:8080", "", 1.0, 1.0).certificates()
    assert isinstance(plain, ssl.SSLContext)
    assert (plain.verify_mode, plain.get_ca_certs()) == (ssl.CERT_REQUIRED, [])
