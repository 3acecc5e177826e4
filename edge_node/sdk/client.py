"""The SDK: ask a Causeway box, sync or async, over HTTP or its Unix socket. One file, needs httpx alone, ships alone.

    from edge_node.sdk.client import Causeway

    with Causeway() as causeway:                      # $CAUSEWAY_URL, else http://127.0.0.1:8080
        answer = causeway.chat("wake me up at six am")
        print(answer.text, answer.decision.route, answer.decision.reason)

        with causeway.chat("Tell me about tides", prefer="prefer_cloud", stream=True) as stream:
            for piece in stream:
                print(piece.text, end="", flush=True)
        print(stream.decision.target, stream.decision.first_token_ms)

`AsyncCauseway` has the same methods to await. Closing a stream (or leaving its ``with``) stops the work on the box and
in the cloud. A `Decision` on each answer says where it came from and why. Every error is a `CausewayError`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import httpx

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

DEFAULT_URL = "http://127.0.0.1:8080"
Prefer = Literal["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]
Messages = str | Sequence[Mapping[str, object]]
Json = Mapping[str, object]
_GRACE_S = 1.0  # past a deadline: the box's own word about it is better than ours
_RETRIED = frozenset({429, 503})


# --- errors ----------------------------------------------------------------------------------------------------------


class CausewayError(Exception):
    """Base of everything that this module raises."""


class CausewayUnreachable(CausewayError):
    """No connection: nothing was sent."""


class CausewayTimeout(CausewayError):
    """The answer, or the next piece of it, did not come in time."""


class CausewayConnectionBroken(CausewayError):
    """The connection ended before the answer did. What had arrived is not the whole answer."""


class CausewayAPIError(CausewayError):
    """The box said no: OpenAI's error object. In the middle of a stream `status` is 200, for the head had been sent."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str = "",  # noqa: A002  # OpenAI's name
        code: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.decision = decision


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """Where an answer came from and why (``x-causeway-*``). `first_token_ms` is measured by this client, on streams."""

    id: str = ""
    route: str = ""  # edge | cloud | cache | none
    target: str = ""
    reason: str = ""
    cache: str = ""  # hit | semantic | stale | miss | bypass | coalesced
    policy: str = ""  # name@revision
    degraded: bool = False
    first_token_ms: float | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True)
class Choice:
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True)
class Answer:
    """A whole answer. `text`, `tool_calls` and `finish_reason` are those of the first choice."""

    decision: Decision
    choices: tuple[Choice, ...] = ()
    usage: Usage = Usage()
    model: str = ""
    total_ms: float = 0.0
    resume: str = ""  # of an answer that the cloud cut short: asked again with it, the same question gets the rest

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls if self.choices else ()

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason if self.choices else ""


@dataclass(frozen=True)
class ToolCallPiece:
    """A piece of tool call number `index`; `id` and `name` come with its first piece."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Piece:
    """What arrived at once of choice `index`; the last piece of an answer may hold the usage alone."""

    text: str = ""
    index: int = 0
    tool_calls: tuple[ToolCallPiece, ...] = ()
    finish_reason: str = ""
    usage: Usage | None = None


@dataclass(frozen=True)
class Vectors:
    vectors: tuple[tuple[float, ...], ...]  # [n_inputs][n_dimensions]
    decision: Decision
    usage: Usage = Usage()
    model: str = ""


@dataclass(frozen=True)
class Model:
    id: str
    owned_by: str = ""


# --- reading the wire ------------------------------------------------------------------------------------------------


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _document(body: bytes | str) -> Json:
    try:
        return _dict(json.loads(body))
    except ValueError:
        return {}


def _decision(headers: httpx.Headers) -> Decision:
    return Decision(
        id=headers.get("x-causeway-decision", ""),
        route=headers.get("x-causeway-route", ""),
        target=headers.get("x-causeway-target", ""),
        reason=headers.get("x-causeway-reason", ""),
        cache=headers.get("x-causeway-cache", ""),
        policy=headers.get("x-causeway-policy", ""),
        degraded=headers.get("x-causeway-degraded", "").lower() in ("1", "true", "yes"),
    )


def _error(status: int, headers: httpx.Headers, body: bytes) -> CausewayAPIError:
    said = _dict(_document(body).get("error"))
    message = _text(said.get("message")) or f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"
    return _api_error(said, message, status, headers)


def _api_error(said: Json, message: str, status: int, headers: httpx.Headers) -> CausewayAPIError:
    try:
        retry_after_s = max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):  # an HTTP date is not what our servers send
        retry_after_s = None
    return CausewayAPIError(
        message,
        status=status,
        type=_text(said.get("type")),
        code=_text(said.get("code")),
        param=_text(said.get("param")) or None,
        retry_after_s=retry_after_s,
        decision=_decision(headers),
    )


def _usage(value: object) -> Usage | None:
    counts = _dict(value)
    if not counts:
        return None
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return Usage(*(_int(counts.get(name)) for name in names))


def _resume(wire: Json) -> str:
    return _text(_dict(wire.get("causeway")).get("continue"))


def _choice(wire: Json) -> Choice:
    message = _dict(wire.get("message"))
    calls = [_dict(call) for call in _list(message.get("tool_calls"))]
    return Choice(
        text=_text(message.get("content")) or _text(wire.get("text")),
        tool_calls=tuple(
            ToolCall(_text(call.get("id")), _text(function.get("name")), _text(function.get("arguments")))
            for call in calls
            for function in [_dict(call.get("function"))]
        ),
        finish_reason=_text(wire.get("finish_reason")),
    )


def _pieces(event: Json) -> Iterator[Piece]:
    usage = _usage(event.get("usage"))
    choices = [_dict(choice) for choice in _list(event.get("choices"))]
    for choice in choices:
        delta = _dict(choice.get("delta"))
        calls = [_dict(call) for call in _list(delta.get("tool_calls"))]
        yield Piece(
            text=_text(delta.get("content")) or _text(choice.get("text")),
            index=_int(choice.get("index")),
            tool_calls=tuple(
                ToolCallPiece(
                    index=_int(call.get("index")),
                    arguments=_text(function.get("arguments")),
                    id=_text(call.get("id")),
                    name=_text(function.get("name")),
                )
                for call in calls
                for function in [_dict(call.get("function"))]
            ),
            finish_reason=_text(choice.get("finish_reason")),
            usage=usage,
        )
    if usage and not choices:
        yield Piece(usage=usage)


@dataclass
class _Draft:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    finish_reason: str = ""

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        for part in piece.tool_calls:
            call = self.calls.get(part.index, ToolCall("", "", ""))
            self.calls[part.index] = ToolCall(
                call.id or part.id, call.name or part.name, call.arguments + part.arguments
            )

    def choice(self) -> Choice:
        return Choice("".join(self.text), tuple(call for _, call in sorted(self.calls.items())), self.finish_reason)


class _Reading:
    """A stream's bytes → pieces, and the answer they add up to. No I/O."""

    def __init__(self, head: httpx.Response, started: float, clock: Callable[[], float]) -> None:
        self.decision = _decision(head.headers)
        self.done = False
        self._head = head
        self._started = started
        self._clock = clock
        self._rest = b""
        self._data: list[bytes] = []
        self._drafts: dict[int, _Draft] = {}
        self._usage = Usage()
        self._model = ""
        self._resume = ""
        self._ended = started

    def feed(self, received: bytes) -> Iterator[Piece]:
        """Server-sent events, whatever the chunking. Only bytes end a line: text may hold any Unicode separator."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in (ended.rstrip(b"\r") for ended in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield from self._event(data)

    def _event(self, data: bytes) -> Iterator[Piece]:
        if data == b"[DONE]":
            self.done = True
            self._ended = self._clock()
            return
        event = _document(data)
        if said := _dict(event.get("error")):
            message = _text(said.get("message")) or "the answer broke off"
            raise _api_error(said, message, self._head.status_code, self._head.headers)
        self._model = _text(event.get("model")) or self._model
        self._resume = _resume(event) or self._resume
        for piece in _pieces(event):
            self._add(piece)
            yield piece

    def _add(self, piece: Piece) -> None:
        if self.decision.first_token_ms is None and (piece.text or piece.tool_calls):
            self.decision = replace(self.decision, first_token_ms=(self._clock() - self._started) * 1000)
        if piece.usage:
            self._usage = piece.usage
        if piece.text or piece.tool_calls or piece.finish_reason:
            self._drafts.setdefault(piece.index, _Draft()).add(piece)

    def answer(self) -> Answer:
        return Answer(
            decision=self.decision,
            choices=tuple(draft.choice() for _, draft in sorted(self._drafts.items())),
            usage=self._usage,
            model=self._model,
            total_ms=(self._ended - self._started) * 1000,
            resume=self._resume,
        )


# --- asking ----------------------------------------------------------------------------------------------------------


class Asked(TypedDict, total=False):
    """What can be said with a question: our wishes, OpenAI's fields as they are, `extra` for those not named here."""

    model: str  # "auto": the policy decides; or a target's name
    prefer: Prefer | None
    tags: Sequence[str]
    deadline_s: float | None
    resume: str  # of an answer that was cut short: its rest is wanted
    temperature: float
    top_p: float
    max_tokens: int
    stop: str | Sequence[str]
    seed: int
    n: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool | int
    top_logprobs: int
    tools: Sequence[Json]
    tool_choice: str | Json
    response_format: Json
    dimensions: int
    user: str
    extra: Json


@dataclass(frozen=True)
class _Ask:
    path: str
    body: Json | None = None  # None: a GET
    hints: Json = field(default_factory=dict)
    deadline_s: float | None = None

    def content(self, left_s: float | None) -> bytes | None:
        if self.body is None:
            return None
        hints = dict(self.hints)
        if left_s is not None:
            hints["deadline_ms"] = max(1, int(left_s * 1000))
        return json.dumps({**self.body, "causeway": hints} if hints else self.body).encode()


def _ask(path: str, said: Json, asked: Asked, *, stream: bool = False) -> _Ask:
    """`said` is the question itself: messages, prompt or input."""
    fields: dict[str, object] = {"model": "auto", **said, **asked}
    fields |= asked.get("extra", {})
    for ours in ("extra", "deadline_s"):
        fields.pop(ours, None)
    hints = {name: value for name in ("prefer", "tags") if (value := fields.pop(name, None))}
    if resume := fields.pop("resume", ""):
        hints["continue"] = resume
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return _Ask(path, fields, hints, asked.get("deadline_s"))


def _chat(path: str, messages: Messages, asked: Asked, *, stream: bool = False) -> _Ask:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(one) for one in messages]
    return _ask(path, {"messages": said}, asked, stream=stream)


def _answer(response: httpx.Response, total_s: float) -> Answer:
    document = _document(response.content)
    return Answer(
        decision=_decision(response.headers),
        choices=tuple(_choice(_dict(choice)) for choice in _list(document.get("choices"))),
        usage=_usage(document.get("usage")) or Usage(),
        model=_text(document.get("model")),
        total_ms=total_s * 1000,
        resume=_resume(document),
    )


def _vectors(response: httpx.Response) -> Vectors:
    document = _document(response.content)
    rows = [_list(_dict(row).get("embedding")) for row in _list(document.get("data"))]
    return Vectors(
        vectors=tuple(tuple(float(x) for x in row if isinstance(x, (int, float))) for row in rows),
        decision=_decision(response.headers),
        usage=_usage(document.get("usage")) or Usage(),
        model=_text(document.get("model")),
    )


def _models(document: Json) -> list[Model]:
    rows = [_dict(row) for row in _list(document.get("data"))]
    return [Model(_text(row.get("id")), _text(row.get("owned_by"))) for row in rows]


@dataclass(frozen=True)
class _Address:
    url: str
    uds: str | None
    headers: Mapping[str, str]
    connect_timeout_s: float
    timeout_s: float

    def timeout(self, left_s: float | None) -> httpx.Timeout:
        wait = self.timeout_s if left_s is None else left_s + _GRACE_S
        return httpx.Timeout(wait, connect=min(self.connect_timeout_s, wait))


def _address(url: str, api_key: str, connect_timeout_s: float, timeout_s: float) -> _Address:
    url = url or os.environ.get("CAUSEWAY_URL", "") or DEFAULT_URL
    api_key = api_key or os.environ.get("CAUSEWAY_API_KEY", "")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    headers["content-type"] = "application/json"
    uds = None
    if url.startswith("unix://"):
        uds, url = url.removeprefix("unix://"), "http://causeway"
    url = url.rstrip("/").removesuffix("/v1")  # an OpenAI client's base_url may be pasted here
    return _Address(url, uds, headers, connect_timeout_s, timeout_s)


def _translate(error: httpx.HTTPError, address: _Address) -> CausewayError:
    where = address.uds or address.url
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return CausewayUnreachable(f"cannot reach {where}: {str(error) or 'timed out'}")
    if isinstance(error, httpx.TimeoutException):
        return CausewayTimeout(f"{where} did not answer in time")
    return CausewayConnectionBroken(f"the connection to {where} broke: {str(error) or type(error).__name__}")


def _pause(error: CausewayAPIError, tried: int, retries: int, left_s: float | None) -> float | None:
    """Seconds to wait before the next try, or None: only where the box said when, and where time is left for it."""
    if tried >= retries or error.status not in _RETRIED or error.retry_after_s is None:
        return None
    return error.retry_after_s if left_s is None or error.retry_after_s < left_s else None


class _Clocked:
    """How much is left of an ask's time."""

    def __init__(self, deadline_s: float | None, clock: Callable[[], float]) -> None:
        self.started = clock()
        self._clock = clock
        self._deadline_s = deadline_s

    def left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - (self._clock() - self.started))

    def check(self) -> None:
        if self._deadline_s is not None and self._clock() - self.started > self._deadline_s + _GRACE_S:
            raise CausewayTimeout(f"the answer took longer than its {self._deadline_s:g} s")


# --- sync ------------------------------------------------------------------------------------------------------------


class Stream:
    """The pieces of one answer, as they come. Leave its ``with``, or `close` it, and the work stops everywhere."""

    def __init__(self, response: httpx.Response, reading: _Reading, clocked: _Clocked, address: _Address) -> None:
        self._response = response
        self._reading = reading
        self._clocked = clocked
        self._address = address
        self._iterator = self._iterate()

    @property
    def decision(self) -> Decision:
        return self._reading.decision

    def answer(self) -> Answer:
        """Read to the end, and all that came as one answer."""
        for _ in self:
            pass
        return self._reading.answer()

    def close(self) -> None:
        self._iterator.close()
        self._response.close()

    def _iterate(self) -> Generator[Piece, None, None]:
        try:
            for received in self._response.iter_bytes():
                yield from self._reading.feed(received)
                self._clocked.check()
        except httpx.HTTPError as error:
            raise _translate(error, self._address) from error
        finally:
            self._response.close()
        if not self._reading.done:
            raise CausewayConnectionBroken("the stream ended before the answer did")

    def __iter__(self) -> Iterator[Piece]:
        return self._iterator

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Causeway:
    """A box, to be asked from sync code; threads may share one.

    `url`: ``http://host:port``, ``unix:///path/to.sock``, or empty for $CAUSEWAY_URL; `api_key` or $CAUSEWAY_API_KEY.
    `timeout_s` bounds the wait for an answer, or between two pieces of it, where an ask has no `deadline_s`.
    `retries`: how often to ask again after a 429 or 503 that says when (Retry-After), within the deadline.
    """

    def __init__(
        self,
        url: str = "",
        *,
        api_key: str = "",
        timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address = _address(url, api_key, connect_timeout_s, timeout_s)
        self._retries = retries
        self._clock = clock
        self._sleep = sleep
        # No proxy from the environment: what is asked of this box goes to this box.
        self._client = httpx.Client(
            base_url=self._address.url,
            headers=dict(self._address.headers),
            transport=httpx.HTTPTransport(uds=self._address.uds),
            trust_env=False,
        )

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = ..., **asked: Unpack[Asked]) -> Answer: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **asked: Unpack[Asked]) -> Stream: ...
    def chat(self, messages: Messages, *, stream: bool = False, **asked: Unpack[Asked]) -> Answer | Stream:
        """Answer a text or a conversation."""
        return self._ask_for_text(_chat("/v1/chat/completions", messages, asked, stream=stream), stream=stream)

    @overload
    def complete(self, prompt: str, *, stream: Literal[False] = ..., **asked: Unpack[Asked]) -> Answer: ...
    @overload
    def complete(self, prompt: str, *, stream: Literal[True], **asked: Unpack[Asked]) -> Stream: ...
    def complete(self, prompt: str, *, stream: bool = False, **asked: Unpack[Asked]) -> Answer | Stream:
        """Continue a text."""
        return self._ask_for_text(_ask("/v1/completions", {"prompt": prompt}, asked, stream=stream), stream=stream)

    def embed(self, texts: str | Sequence[str], **asked: Unpack[Asked]) -> Vectors:
        said = texts if isinstance(texts, str) else list(texts)
        return _vectors(self._whole(_ask("/v1/embeddings", {"input": said}, asked)))

    def route(self, messages: Messages, **asked: Unpack[Asked]) -> Json:
        """What would happen, without running it: the box's own explanation (`POST /v1/route`)."""
        return _document((self._whole(_chat("/v1/route", messages, asked))).content)

    def decision(self, decision_id: str) -> Json:
        """The record of a past answer, attempt by attempt (`GET /v1/decisions/{id}`)."""
        return _document((self._whole(_Ask(f"/v1/decisions/{decision_id}"))).content)

    def models(self) -> list[Model]:
        return _models(_document((self._whole(_Ask("/v1/models"))).content))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ask_for_text(self, ask: _Ask, *, stream: bool) -> Answer | Stream:
        if stream:
            response, clocked = self._open(ask)
            return Stream(response, _Reading(response, clocked.started, self._clock), clocked, self._address)
        started = self._clock()
        return _answer(self._whole(ask), self._clock() - started)

    def _whole(self, ask: _Ask) -> httpx.Response:
        response, _ = self._open(ask)
        try:
            response.read()
        except httpx.HTTPError as error:
            raise _translate(error, self._address) from error
        finally:
            response.close()
        return response

    def _open(self, ask: _Ask) -> tuple[httpx.Response, _Clocked]:
        """A response with a good status, its body still to be read."""
        clocked = _Clocked(ask.deadline_s, self._clock)
        tried = 0
        while True:
            try:
                return self._send(ask, clocked.left_s()), clocked
            except CausewayAPIError as error:
                pause = _pause(error, tried, self._retries, clocked.left_s())
                if pause is None:
                    raise
            self._sleep(pause)
            tried += 1

    def _send(self, ask: _Ask, left_s: float | None) -> httpx.Response:
        method = "GET" if ask.body is None else "POST"
        timeout = self._address.timeout(left_s)
        request = self._client.build_request(method, ask.path, content=ask.content(left_s), timeout=timeout)
        try:
            response = self._client.send(request, stream=True)
            if response.status_code < 400:
                return response
            try:
                response.read()
            finally:
                response.close()
        except httpx.HTTPError as error:
            raise _translate(error, self._address) from error
        raise _error(response.status_code, response.headers, response.content)


# --- async -----------------------------------------------------------------------------------------------------------


class AsyncStream:
    """As `Stream`: ``async with await causeway.chat(…, stream=True) as stream: async for piece in stream: …``."""

    def __init__(self, response: httpx.Response, reading: _Reading, clocked: _Clocked, address: _Address) -> None:
        self._response = response
        self._reading = reading
        self._clocked = clocked
        self._address = address
        self._iterator = self._iterate()

    @property
    def decision(self) -> Decision:
        return self._reading.decision

    async def answer(self) -> Answer:
        """Read to the end, and all that came as one answer."""
        async for _ in self:
            pass
        return self._reading.answer()

    async def close(self) -> None:
        await self._iterator.aclose()
        await self._response.aclose()

    async def _iterate(self) -> AsyncGenerator[Piece, None]:
        try:
            async for received in self._response.aiter_bytes():
                for piece in self._reading.feed(received):
                    yield piece
                self._clocked.check()
        except httpx.HTTPError as error:
            raise _translate(error, self._address) from error
        finally:
            await self._response.aclose()
        if not self._reading.done:
            raise CausewayConnectionBroken("the stream ended before the answer did")

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._iterator

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class AsyncCauseway:
    """As `Causeway`, to be awaited."""

    def __init__(
        self,
        url: str = "",
        *,
        api_key: str = "",
        timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._address = _address(url, api_key, connect_timeout_s, timeout_s)
        self._retries = retries
        self._clock = clock
        self._sleep = sleep
        self._client = httpx.AsyncClient(
            base_url=self._address.url,
            headers=dict(self._address.headers),
            transport=httpx.AsyncHTTPTransport(uds=self._address.uds),
            trust_env=False,
        )

    @overload
    async def chat(self, messages: Messages, *, stream: Literal[False] = ..., **asked: Unpack[Asked]) -> Answer: ...
    @overload
    async def chat(self, messages: Messages, *, stream: Literal[True], **asked: Unpack[Asked]) -> AsyncStream: ...
    async def chat(self, messages: Messages, *, stream: bool = False, **asked: Unpack[Asked]) -> Answer | AsyncStream:
        """Answer a text or a conversation."""
        return await self._ask_for_text(_chat("/v1/chat/completions", messages, asked, stream=stream), stream=stream)

    @overload
    async def complete(self, prompt: str, *, stream: Literal[False] = ..., **asked: Unpack[Asked]) -> Answer: ...
    @overload
    async def complete(self, prompt: str, *, stream: Literal[True], **asked: Unpack[Asked]) -> AsyncStream: ...
    async def complete(self, prompt: str, *, stream: bool = False, **asked: Unpack[Asked]) -> Answer | AsyncStream:
        """Continue a text."""
        return await self._ask_for_text(
            _ask("/v1/completions", {"prompt": prompt}, asked, stream=stream), stream=stream
        )

    async def embed(self, texts: str | Sequence[str], **asked: Unpack[Asked]) -> Vectors:
        said = texts if isinstance(texts, str) else list(texts)
        return _vectors(await self._whole(_ask("/v1/embeddings", {"input": said}, asked)))

    async def route(self, messages: Messages, **asked: Unpack[Asked]) -> Json:
        """What would happen, without running it: the box's own explanation (`POST /v1/route`)."""
        return _document((await self._whole(_chat("/v1/route", messages, asked))).content)

    async def decision(self, decision_id: str) -> Json:
        """The record of a past answer, attempt by attempt (`GET /v1/decisions/{id}`)."""
        return _document((await self._whole(_Ask(f"/v1/decisions/{decision_id}"))).content)

    async def models(self) -> list[Model]:
        return _models(_document((await self._whole(_Ask("/v1/models"))).content))

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask_for_text(self, ask: _Ask, *, stream: bool) -> Answer | AsyncStream:
        if stream:
            response, clocked = await self._open(ask)
            return AsyncStream(response, _Reading(response, clocked.started, self._clock), clocked, self._address)
        started = self._clock()
        return _answer(await self._whole(ask), self._clock() - started)

    async def _whole(self, ask: _Ask) -> httpx.Response:
        response, _ = await self._open(ask)
        try:
            await response.aread()
        except httpx.HTTPError as error:
            raise _translate(error, self._address) from error
        finally:
            await response.aclose()
        return response

    async def _open(self, ask: _Ask) -> tuple[httpx.Response, _Clocked]:
        """A response with a good status, its body still to be read."""
        clocked = _Clocked(ask.deadline_s, self._clock)
        tried = 0
        while True:
            try:
                return await self._send(ask, clocked.left_s()), clocked
            except CausewayAPIError as error:
                pause = _pause(error, tried, self._retries, clocked.left_s())
                if pause is None:
                    raise
            await self._sleep(pause)
            tried += 1

    async def _send(self, ask: _Ask, left_s: float | None) -> httpx.Response:
        method = "GET" if ask.body is None else "POST"
        timeout = self._address.timeout(left_s)
        request = self._client.build_request(method, ask.path, content=ask.content(left_s), timeout=timeout)
        try:
            response = await self._client.send(request, stream=True)
            if response.status_code < 400:
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise _translate(error, self._address) from error
        raise _error(response.status_code, response.headers, response.content)
