"""bytes → Request: who asks, what they wish, and the body; bounded in bytes, in time and over all connections.

A body that came together with its head costs no waiting and no timer: that is nearly every request. A short one that
was asked lately, byte for byte, is not parsed again: that is what comes before nearly every hit.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import get_args

import anyio
import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from router.decision.cache_key import CachePlanMemo
from router.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    UnsupportedMediaType,
)
from router.openai import parse_chat, parse_completion, parse_embedding
from router.types import Kind, Prefer, Request, RoutingHints

from ..config.schema import KeyConfig, ServerConfig

_PARSERS: Mapping[Kind, Callable[[bytes, RoutingHints], Request]] = {
    "chat": partial(parse_chat, resumes=True),
    "completion": partial(parse_completion, resumes=True),
    "embedding": parse_embedding,
}
_BODIES = 8  # as many bodies of the largest size may be on their way at the same time
_PREFERENCES: frozenset[str] = frozenset(get_args(Prefer))
_TAG = re.compile(r"[^\s,]{1,64}")
_MAX_TAGS = 32
_KNOWN = 2048  # asks that are remembered, each of at most so many bytes:
_SHORT_BYTES = 4096
_JSON = "application/json"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Caller(msgspec.Struct, frozen=True):
    """Who asks: a key's name, else the peer's address; `tags` are added to every request of the key."""

    name: str
    tags: tuple[str, ...] = ()


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed ask, and what was planned for it lately."""

    request: Request
    memo: CachePlanMemo


class ApiKeys:
    """The keys that open this server; only their hashes are known. None configured: everybody may come in."""

    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), Caller(key.name, key.tags)) for key in keys]

    def identify(self, authorization: str | None, peer: str) -> Caller:
        """Raises AuthenticationFailed. Compares with every key, each in constant time."""
        if not self._keys:
            return Caller(peer)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationFailed("an API key is needed: send `Authorization: Bearer <key>`")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [caller for known, caller in self._keys if hmac.compare_digest(known, digest)]
        if not found:
            raise AuthenticationFailed("this API key is not known here")
        return found[0]


class RequestReader:
    """One server's way in."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = ApiKeys(config.keys)
        self._max_body_bytes = config.max_body_bytes
        self._timeout_s = config.read_timeout_s
        self._arriving_bytes = 0
        self._known: OrderedDict[tuple[Kind | None, bytes, RoutingHints], ParsedRequest] = OrderedDict()

    def caller(self, request: web.BaseRequest) -> Caller:
        """Raises AuthenticationFailed."""
        return self._keys.identify(request.headers.get(hdrs.AUTHORIZATION), request.remote or "unix")

    async def request(self, request: web.BaseRequest, kind: Kind | None) -> ParsedRequest:
        """The parsed ask; `kind` None: what the body's fields say. Raises CausewayError, each a client's fault."""
        headers = request.headers
        hints = wishes_of(headers, self.caller(request))
        _check_media(headers)
        return self._parse(kind, await self.body(request), hints)

    def _parse(self, kind: Kind | None, body: bytes, hints: RoutingHints) -> ParsedRequest:
        key = (kind, body, hints)
        known = self._known.get(key)
        if known is None:
            known = ParsedRequest(_PARSERS[kind or _kind_of(body)](body, hints), CachePlanMemo())
            if len(body) <= _SHORT_BYTES:
                self._known[key] = known
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        return known

    async def body(self, request: web.BaseRequest) -> bytes:
        content = request.content
        if content.is_eof():
            body = _read_now(content.read_nowait)
            if len(body) > self._max_body_bytes:
                raise self._too_large()
            return body
        declared = request.content_length
        if declared is not None and declared > self._max_body_bytes:
            raise self._too_large()
        if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await request.writer.write(_CONTINUE)
            request.writer.output_size = 0  # the answer's own bytes are still to come
        return await self._receive(request)

    async def _receive(self, request: web.BaseRequest) -> bytes:
        body = bytearray()
        with anyio.CancelScope(deadline=anyio.current_time() + self._timeout_s) as bound, self._room() as take:
            try:
                while data := await request.content.readany():
                    body += data
                    if len(body) > self._max_body_bytes:
                        raise self._too_large()
                    take(len(data))
            except RequestPayloadError as error:
                raise InvalidRequest("the body's transfer encoding is malformed") from error
        if bound.cancelled_caught:
            raise RequestTimeout(f"the body did not arrive within {self._timeout_s:g} s")
        return bytes(body)

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Bounds what all half received bodies take together."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._arriving_bytes + size > self._max_body_bytes * _BODIES:
                raise QueueFull("too many large requests are arriving at the same time", retry_after_s=1.0)
            taken += size
            self._arriving_bytes += size

        try:
            yield take
        finally:
            self._arriving_bytes -= taken

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes")


def wishes_of(headers: Mapping[str, str], caller: Caller) -> RoutingHints:
    """The ``x-causeway-*`` headers. A wish that cannot be understood is refused: it may be one for privacy."""
    prefer = headers.get("x-causeway-prefer")
    tags = headers.get("x-causeway-tags")
    deadline = headers.get("x-causeway-deadline-ms")
    if prefer is None and tags is None and deadline is None:
        return RoutingHints(client=caller.name, tags=caller.tags)
    return RoutingHints(
        prefer=_prefer(prefer),
        tags=tuple(sorted({*caller.tags, *_tags(tags)})),
        client=caller.name,
        deadline_ms=_deadline_ms(deadline),
    )


def traceparent_of(headers: Mapping[str, str]) -> str:
    """W3C trace context, version 00; a malformed one is dropped, as its specification asks."""
    trace = headers.get("traceparent")
    return trace if trace is not None and _TRACEPARENT.fullmatch(trace) else ""


def _prefer(text: str | None) -> Prefer | None:
    if not text:
        return None
    for name in get_args(Prefer):
        if text == name:
            preference: Prefer = name
            return preference
    names = ", ".join(sorted(_PREFERENCES))
    raise InvalidRequest(f"`x-causeway-prefer` is one of {names}, not {text[:64]!r}", param="x-causeway-prefer")


def _tags(text: str | None) -> list[str]:
    tags = [tag.strip() for tag in (text or "").split(",") if tag.strip()]
    if len(tags) > _MAX_TAGS or not all(_TAG.fullmatch(tag) for tag in tags):
        told = f"`x-causeway-tags` holds at most {_MAX_TAGS} tags of at most 64 characters, separated by commas"
        raise InvalidRequest(told, param="x-causeway-tags")
    return tags


def _deadline_ms(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        told = "`x-causeway-deadline-ms` is the time left, a whole number of milliseconds"
        raise InvalidRequest(told, param="x-causeway-deadline-ms")
    return int(text)


def _check_media(headers: Mapping[str, str]) -> None:
    media = headers.get(hdrs.CONTENT_TYPE, _JSON)
    if media != _JSON and media.partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType(f"send `Content-Type: {_JSON}`, not {media[:64]!r}")
    encoding = headers.get(hdrs.CONTENT_ENCODING)
    if encoding is not None and encoding.lower() != "identity":
        raise UnsupportedMediaType(f"bodies are not accepted compressed ({encoding[:32]})")


class _Shape(msgspec.Struct):
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _kind_of(body: bytes) -> Kind:
    """Which of OpenAI's three bodies this is; a broken one is a chat, whose parser says what is wrong with it."""
    try:
        shape = msgspec.json.decode(body, type=_Shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "chat"
    if shape.prompt is not msgspec.UNSET:
        return "completion"
    return "chat" if shape.input is msgspec.UNSET else "embedding"


def _read_now(read: Callable[[int], bytes]) -> bytes:
    try:
        return read(-1)
    except RequestPayloadError as error:
        raise InvalidRequest("the body's transfer encoding is malformed") from error


def retry_after(seconds: float) -> str:
    """RFC 9110 wants whole seconds; rounded up, so that whoever waits does not come too early."""
    return str(max(1, math.ceil(seconds)))
