"""bytes → Request: authentication, routing hints and the body; bounded in bytes, in time and over all connections.

A body that arrives together with its head, as nearly every one does, needs no wait and no timer. A short body that is
equal to a recent one is not parsed again; nearly every cache hit starts that way.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Literal, Protocol, get_args

import msgspec
from aiohttp import hdrs, web

from router.decision.decide import RequestMemo
from router.errors import AuthenticationFailed, QueueFull
from router.openai.chat import parse_chat
from router.openai.completions import parse_completion
from router.openai.embeddings import parse_embedding
from router.openai.request_body import BOM, check_header_names, check_media_type
from router.openai.responses.request import RESPONSE_ONLY, ResponseEcho, parse_response
from router.parts.uploads import FILE_MARK
from router.serving.request import (
    DEADLINE,
    OURS,
    TAGS,
    arrived_body,
    combined,
    read_authorization,
    read_choice,
    read_deadline_ms,
    read_tags,
    receive_body,
)
from router.trackers import MAX_CLIENTS, FairShare, network_of
from router.types import Kind, Prefer, Request, RoutingHints

from ..config.schema import KeyConfig, ServerConfig

Endpoint = Literal["chat", "completion", "embedding", "response"]
"""Which of OpenAI's bodies it is. A response is a request of the kind chat."""
Room = Callable[[], AbstractContextManager[Callable[[int], None]]]
"""Bounds what is in memory: yields the function that reserves bytes, which raises QueueFull."""

# The reference in ``edge_node/README.md`` is generated from this table.
REQUEST_HEADERS: Mapping[str, str] = {
    "Authorization": "`Bearer KEY`; required if `server.keys` is set",
    "x-causeway-prefer": "`prefer_on_device`, `only_on_device`, `prefer_cloud` or `only_cloud`; "
    "narrows the policy, never widens it",
    "x-causeway-tags": "tags for the policy's rules, separated by commas; at most 32 tags of at most 64 characters; "
    "case does not count",
    "x-causeway-deadline-ms": "time left for this request, milliseconds",
    "x-causeway-priority": "priority of a job: `interactive`, `standard` or `bulk`",
    "Prefer": "`respond-async, wait=SECONDS` (RFC 7240): a request that takes longer becomes a job",
    "Idempotency-Key": "of a job: the same request with the same key is the same job",
    "traceparent": "W3C trace context of the client",
}
_PARSERS: Mapping[Kind, Callable[[bytes, RoutingHints], Request]] = {
    "chat": partial(parse_chat, resumes=True),
    "completion": partial(parse_completion, resumes=True),
    "embedding": parse_embedding,
}
_MAX_LARGE_BODIES = 8  # bodies of the largest size that may be in transit at the same time
_PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
_HEADERS = frozenset(name for name in REQUEST_HEADERS if name.startswith(OURS))
_MAX_REMEMBERED = 2048  # parsed requests in memory, for bodies of at most:
_SHORT_BYTES = 4096


class Caller(msgspec.Struct, frozen=True):
    """The client: its API key's name, else the peer's address; `tags` are added to every request of the key.

    `reads_all_decisions`: it may read the decision records of other clients.
    """

    name: str
    tags: tuple[str, ...] = ()
    reads_all_decisions: bool = False

    @property
    def reads_decisions_of(self) -> str:
        """The client whose decision records it may read; "": all."""
        return "" if self.reads_all_decisions else self.name


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed request, and what was derived from it. `echo`: only of one that is answered as a response."""

    request: Request
    memo: RequestMemo
    echo: ResponseEcho | None = None


class ApiKeys:
    """The accepted API keys, as hashes. Without keys every client is accepted."""

    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), _caller(key)) for key in keys]

    def __len__(self) -> int:
        return len(self._keys)

    def identify(self, authorization: str | None, peer: str) -> Caller:
        """The client of an `Authorization` header; `peer` is its address. Raises AuthenticationFailed.

        Every key is compared, each in constant time.
        """
        if not self._keys:
            return Caller(peer, reads_all_decisions=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationFailed("an API key is needed: send `Authorization: Bearer <key>`")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [caller for key_digest, caller in self._keys if hmac.compare_digest(key_digest, digest)]
        if not matches:
            raise AuthenticationFailed("this API key is unknown")
        return matches[0]


def _caller(key: KeyConfig) -> Caller:
    return Caller(key.name, key.tags, reads_all_decisions="decisions" in key.rights)


class BodyFiles(Protocol):
    """The uploaded files that bodies may name."""

    async def inline(self, body: bytes, owner: str, room: Room) -> bytes:
        """Return a body with the files of `owner` in it. Raises CausewayError."""
        ...


class RequestReader:
    """Reads requests as `server.*` configures.

    Args:
        files: the uploaded files that bodies may name.
    """

    def __init__(self, config: ServerConfig, files: BodyFiles | None = None) -> None:
        self._files = files
        self._keys = ApiKeys(config.keys)
        self._max_body_bytes = config.max_body_bytes
        self._timeout_s = config.read_timeout_s
        self._arriving = FairShare(config.max_connections)  # requests whose body arrives
        self._arriving_bytes = FairShare(config.max_body_bytes * _MAX_LARGE_BODIES)
        # By kind, body and hints.
        self._remembered: OrderedDict[tuple[Endpoint | None, bytes, RoutingHints], ParsedRequest] = OrderedDict()

    def caller(self, request: web.BaseRequest) -> Caller:
        """Raises AuthenticationFailed, or InvalidRequest for two keys."""
        return self.identify(read_authorization(request), request)

    def identify(self, authorization: str | None, request: web.BaseRequest) -> Caller:
        """The client that sends this value of `Authorization`. Raises AuthenticationFailed."""
        return self._keys.identify(authorization, request.remote or "unix")

    async def request(self, request: web.BaseRequest, kind: Endpoint | None) -> ParsedRequest:
        """Read and parse one request. `kind` None: derive it from the body. Raises CausewayError, each a 4xx."""
        headers = request.headers
        hints = routing_hints(headers, self.caller(request))
        check_media_type(headers.get(hdrs.CONTENT_TYPE), headers.get(hdrs.CONTENT_ENCODING))
        body = await self.body(request)
        if FILE_MARK in body:
            body = await self.with_files(body, hints.client)
        return self._parse(kind, body, hints)

    async def with_files(self, body: bytes, client: str) -> bytes:
        """Return a body with the client's uploaded files in place of their ids. Raises as `BodyFiles.inline`."""
        return body if self._files is None else await self._files.inline(body, client, partial(self._room, client))

    def _parse(self, kind: Endpoint | None, body: bytes, hints: RoutingHints) -> ParsedRequest:
        if len(body) > _SHORT_BYTES:
            return _parsed(kind, body, hints)
        key = (kind, body, hints)
        parsed = self._remembered.get(key)
        if parsed is None:
            parsed = self._remembered[key] = _parsed(kind, body, hints)
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return parsed

    async def body(self, request: web.BaseRequest) -> bytes:
        """The complete body. Raises InvalidRequest, BodyTooLarge, RequestTimeout or QueueFull."""
        body = arrived_body(request, self._max_body_bytes)
        if body is not None:
            return body
        caller = network_of(self.caller(request).name)
        if not self._arriving.hold(id(request), caller):
            raise self._crowded(self._arriving, caller, "requests")
        try:
            with self._room(caller) as hold:
                return await receive_body(request, self._max_body_bytes, self._timeout_s, hold)
        finally:
            self._arriving.release(id(request))

    @contextmanager
    def _room(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Bound the memory of all partly received bodies together; yields what counts a body's bytes."""
        caller, holder = network_of(caller), object()

        def hold(size: int) -> None:
            if not self._arriving_bytes.hold(holder, caller, size):
                raise self._crowded(self._arriving_bytes, caller, "bytes of requests")

        try:
            yield hold
        finally:
            self._arriving_bytes.release(holder)

    def _crowded(self, pool: FairShare, caller: str, what: str) -> QueueFull:
        held = pool.held_by(caller)
        return QueueFull(
            f"Too many large or slow requests are arriving: {held} {what} of yours, your share of {pool.capacity}. "
            "Send fewer at the same time.",
            retry_after_s=1.0,
        )


def _parsed(kind: Endpoint | None, body: bytes, hints: RoutingHints) -> ParsedRequest:
    endpoint = kind or _endpoint_of(body)
    if endpoint == "response":
        request, echo = parse_response(body, hints, resumes=True)
        return ParsedRequest(request, RequestMemo(), echo)
    return ParsedRequest(_PARSERS[endpoint](body, hints), RequestMemo())


def routing_hints(headers: Mapping[str, str], caller: Caller) -> RoutingHints:
    """The ``x-causeway-*`` headers, each line of them.

    Raises:
        InvalidRequest: A value or a name is unknown, or a header has two values: it may be meant to protect privacy.
    """
    for name in headers:
        if name[:11].lower() == OURS:
            lines = combined(headers.items())
            check_header_names(lines, _HEADERS)
            break
    else:
        return _without_hints(caller.name, caller.tags)
    return RoutingHints(
        prefer=read_choice(lines, "x-causeway-prefer", _PREFERENCES),
        tags=(*caller.tags, *read_tags(lines.get(TAGS, ""))),
        client=caller.name,
        deadline_ms=read_deadline_ms(lines.get(DEADLINE)),
    )


@lru_cache(MAX_CLIENTS)
def _without_hints(client: str, tags: tuple[str, ...]) -> RoutingHints:
    return RoutingHints(client=client, tags=tags)


def _endpoint_of(body: bytes) -> Endpoint:
    """Which of OpenAI's four bodies this is; a malformed one counts as chat, whose parser reports the fault.

    `input` is for embeddings, unless it has messages or the body has a key that only a response has.
    """
    try:
        fields = msgspec.json.decode(body.removeprefix(BOM), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "chat"
    if "input" not in fields:
        return "completion" if "prompt" in fields else "chat"
    has_items = re.match(rb"\s*\[\s*\{", fields["input"]) is not None
    return "response" if has_items or not RESPONSE_ONLY.isdisjoint(fields) else "embedding"
