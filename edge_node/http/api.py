"""The HTTP API: the handlers of all paths, the reading of requests, and the handlers of answers.

Every error is sent as OpenAI's error object, for Messages as Anthropic's.

    POST /v1/chat/completions /v1/completions /v1/embeddings     an answer
    POST /v1/responses                                           the same, as a Response object
    POST /v1/messages[/count_tokens]                             the same, as Anthropic's Message
    POST /v1/tokenize /v1/detokenize                             the tokens of a prompt, the text of tokens
    POST /v1/route                                               the decision for such a request, without running it
    GET  /v1/models, /v1/decisions, /healthz, …                  see `inspection`
    POST /v1/audio/transcriptions /v1/audio/speech               see `parts.audio`
    POST GET /v1/jobs, GET DELETE /v1/jobs/{id}                  see `jobs`
    GET  /v1/responses/{id} /v1/conversations/{id}…              see `responses`
    GET  /console…                                               the page, see `console.routes`
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import math
import os
import random
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast, get_args

import msgspec

from causeway_server.router.anthropic.replies import COUNT_TOKENS, MESSAGES, VERSION_HEADER, TokenCount, check_version
from causeway_server.router.anthropic.request import MessageTerms, parse_count, parse_messages
from causeway_server.router.decision.decide import RequestMemo
from causeway_server.router.errors import (
    AuthenticationFailed,
    CausewayError,
    ClientGone,
    IdentityUnavailable,
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    QueueFull,
)
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.openai.chat import general_chat, parse_chat, text_chat
from causeway_server.router.openai.completions import parse_completion
from causeway_server.router.openai.embeddings import parse_embedding
from causeway_server.router.openai.request_body import BOM, check_header_names, check_media_type
from causeway_server.router.openai.responses.compaction import COMPACT_PATH, compaction_request
from causeway_server.router.openai.responses.request import RESPONSE_ONLY, ResponseEcho, parse_response
from causeway_server.router.openai.responses.state import Turn, names_state
from causeway_server.router.openai.tokens import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizedText,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from causeway_server.router.parts.uploads import FILE_MARK
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.residency import region_tags
from causeway_server.router.serving.listener import ANSWERED, DirectWork
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.serving.request import (
    DEADLINE,
    OURS,
    PRIORITY,
    TAGS,
    AiohttpRequest,
    HttpExchange,
    PlainRequest,
    allowed_methods,
    arrived_body,
    client_certificate,
    combined,
    read_choice,
    read_credential,
    read_deadline_ms,
    read_tags,
    read_traceparent,
    receive_body,
    served_method,
)
from causeway_server.router.serving.responses import (
    Echo,
    ExchangeHandler,
    Handler,
    HttpReplyWriter,
    ServerResponse,
    device_header_lines,
    json_response,
    refusal,
)
from causeway_server.router.serving.stored.responses import StoredResponses
from causeway_server.router.serving.upstream.direct import DirectConnection
from causeway_server.router.session_tags import HEADER as SESSION
from causeway_server.router.session_tags import read_session, tags_of_session
from causeway_server.router.trackers import MAX_CLIENTS, FairShare, network_of
from causeway_server.router.types import Kind, Prefer, Priority, Request, RoutingHints, folded_tags

from ..backends.cloud.history import CLOUD_KEY, CloudHistory
from ..config.schema import LimitsConfig, ServerConfig
from ..serving.direct import ID_HEADERS, Arrival, DirectAnswer, DirectAnswers
from ..serving.direct_hits import DirectHits
from ..serving.generation import policy_label
from ..serving.requests import Records, RequestContext
from ..serving.service import Service
from ..storage.policies import PolicyStore

if TYPE_CHECKING:
    from causeway_server.router.serving.issuers.claims import TokenIdentity
    from causeway_server.router.serving.issuers.tokens import IssuerTokens

    from ..observability.tracing import RequestTracer

log = logging.getLogger(__name__)

Endpoint = Literal["chat", "completion", "embedding", "response", "message", "count"]
"""The kind of a body. Responses and messages are requests of the kind chat."""
Room = Callable[[], AbstractContextManager[Callable[[int], None]]]
"""Function that limits the bytes in memory: yields the function that reserves bytes, which raises QueueFull."""
_PARSERS: Mapping[Kind, Callable[[bytes, RoutingHints], Request]] = {
    "chat": parse_chat,
    "completion": parse_completion,
    "embedding": parse_embedding,
}
_MAX_LARGE_BODIES = 8  # maximum number of concurrent bodies of the largest size
_PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
_HEADERS = frozenset(
    {"x-causeway-prefer", "x-causeway-tags", CLOUD_KEY, "x-causeway-deadline-ms", "x-causeway-priority"}
)
"""The headers of requests that begin with `x-causeway-`; `edge_node/openapi.yaml` describes them."""
_MAX_REMEMBERED = 2048  # number of parsed requests in memory, for bodies of at most:
_SHORT_BYTES = 4096
_IDENTIFIED_S = 1.0  # how long a connection's token is not verified again
_TEMPERATURE = b'"temperature"'
_SAMPLED = re.compile(rb'"temperature":\s*(?:0?\.0*)?[1-9]')
_WITH_STATE = ("response", None)  # kinds of bodies that may name stored responses
_ANSWER_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", COMPACT_PATH, MESSAGES),
        *("/v1/audio/transcriptions", "/v1/audio/speech"),
    }
)
AsJob: TypeAlias = "Callable[[AiohttpRequest], Awaitable[ServerResponse | None]]"

_TARGET = "x-causeway-target"
_CHAT = "/v1/chat/completions"
_ID = "{id}"  # one step of a path
_ANY_ID = "{id:.*}"  # the rest of a path
_random = random.Random(os.urandom(32))


class Caller(msgspec.Struct, frozen=True):
    """The client: its API key's name or token's subject, else the peer's address; `tags` are added to every request."""

    name: str
    tags: tuple[str, ...] = ()
    reads_all_decisions: bool = False  # whether it may read the decision records of other clients
    erases_all: bool = False  # whether it may erase the data of other clients
    scopes: frozenset[str] | None = None  # scopes of its token; None for all
    priority: Priority = "interactive"  # highest priority of its requests and jobs
    is_issued: bool = False  # whether it has a token, which expires

    @property
    def reads_decisions_of(self) -> str:
        """The client whose decision records it may read; "" for all."""
        return "" if self.reads_all_decisions else self.name


def issued_caller(identity: TokenIdentity) -> Caller:
    """Return the client whom an issuer's token names."""
    tags, scopes = region_tags(identity.regions), identity.scopes
    return Caller(
        f"{identity.tenant}/{identity.device}", tags, scopes=scopes, priority=identity.priority, is_issued=True
    )


class HeadFacts(msgspec.Struct, frozen=True):
    """Facts of a head: the routing hints with the client, and the W3C trace context ("" for none). The client is
    identified again once it `ends` (monotonic, s), as its token may have expired.
    """

    hints: RoutingHints
    traceparent: str
    ends: float = math.inf

    @property
    def hold(self) -> bool:
        """Whether the client need not be identified again."""
        return self.ends == math.inf or time.monotonic() < self.ends


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed request, and its derived values. `echo`: set for one that is answered as a response or message; `turn`:
    for one that names stored responses, or is stored; `encoded`: as of `TextChat`, for a sampled one.
    """

    request: Request
    memo: RequestMemo
    echo: Echo | None = None
    turn: Turn | None = None
    encoded: bytes = b""


class BodyFiles(Protocol):
    """The uploaded files that bodies may name."""

    async def inline(self, body: bytes, owner: str, room: Room) -> bytes:
        """Return a body with the files of `owner` inlined. Raises CausewayError."""
        ...


class RequestReader:
    """Reads requests according to `server.*`: bytes → Request, with authentication and routing hints.

    Bodies are limited in bytes, in time and over all connections. A body that arrives together with its head, as nearly
    all do, needs no wait and no timer. A short body that came twice of late is not parsed again; nearly every cache hit
    starts that way. `history`: reader of the responses that the cloud stores; `issuers`: verifier of their tokens.
    """

    def __init__(
        self,
        config: ServerConfig,
        files: BodyFiles | None = None,
        responses: StoredResponses | None = None,
        history: CloudHistory | None = None,
        issuers: IssuerTokens[Caller] | None = None,
        limits: LimitsConfig | None = None,
    ) -> None:
        self.issuers = issuers
        self._limits = limits
        self._files = files
        self._responses = responses
        self._history = history
        self._keys = [  # only hashes are kept
            (bytes.fromhex(key.sha256), Caller(key.name, key.tags, "decisions" in key.rights, "erasure" in key.rights))
            for key in config.keys
        ]
        self._max_body_bytes = config.max_body_bytes
        self._timeout_s = config.read_timeout_s
        self._arriving = FairShare(config.max_connections)  # number of requests whose body is arriving
        self._arriving_bytes = FairShare(config.max_body_bytes * _MAX_LARGE_BODIES)
        # Key: kind, SHA-256 of the body, and hints. The body itself is not kept. None: it came once.
        self._remembered: OrderedDict[tuple[Endpoint | None, bytes, RoutingHints], ParsedRequest | None] = OrderedDict()

    async def ready(self, authorization: str) -> None:
        """Wait for the keys of the token's issuer if it may have newer ones. Raises IdentityUnavailable."""
        if self.issuers is not None:
            await self.issuers.ready(authorization)

    def caller(self, request: HttpExchange, scope: Literal["chat", "jobs"] = "chat") -> Caller:
        """Return the client of a request. Raises like `identify`, and InvalidRequest for two keys."""
        return self.identify(read_credential(request), request, scope)

    def identify(
        self, authorization: str | None, request: HttpExchange, scope: Literal["chat", "jobs"] = "chat"
    ) -> Caller:
        """Return the client that sends this `Authorization`, within its limits; without configured keys every client is
        accepted, under the name in its certificate if it has one. Every key is compared, each in constant time. Raises
        AuthenticationFailed; IdentityUnavailable if the keys of the token's issuer cannot be read; PermissionDenied if
        the token lacks the scope, or its tenant may not use this device.
        """
        caller = self._identify(authorization, request, scope)
        if self._limits is None:
            return caller
        most = self._limits.of(caller.name)[1].priority
        return caller if RANK[most] <= RANK[caller.priority] else msgspec.structs.replace(caller, priority=most)

    def _identify(self, authorization: str | None, request: HttpExchange, scope: Literal["chat", "jobs"]) -> Caller:
        issued = None if self.issuers is None else self.issuers.verify(authorization or "")
        if issued is not None:
            if issued.scopes is not None and scope not in issued.scopes:
                raise PermissionDenied(f"This token lacks the scope `{scope}`, which the request needs.")
            return issued
        if not self._keys and (certificate := client_certificate(request)) is not None:
            return Caller(certificate.name)
        if not self._keys and self.issuers is None:
            return Caller(request.remote or "unix", reads_all_decisions=True, erases_all=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationFailed("An API key is required: send `Authorization: Bearer <key>`.")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [caller for key_digest, caller in self._keys if hmac.compare_digest(key_digest, digest)]
        if not matches:
            raise AuthenticationFailed("This API key is unknown.")
        return matches[0]

    def check_again(self, authorization: str) -> None:
        """Check an accepted client again while it is served. Raises AuthenticationFailed if its token has expired."""
        if self.issuers is not None:
            with suppress(IdentityUnavailable):  # it was accepted
                self.issuers.verify(authorization)

    def forget(self) -> None:
        """Forget the requests that were parsed of late."""
        self._remembered.clear()

    async def request(
        self, request: HttpExchange, kind: Endpoint | None, facts: HeadFacts | None = None, *, compacts: bool = False
    ) -> ParsedRequest:
        """Read and parse one request. Raises CausewayError, each a 4xx. `kind` None: derive it from the body; `facts`:
        those of its head, if they were read already; `compacts`: whether it asks for a compacted response.
        """
        hints = (facts or self.facts(request)).hints
        body = arrived_body(request, self._max_body_bytes)
        if body is None:
            body = await self._arriving_body(request)
        body = compaction_request(body) if compacts else body
        if self._responses is not None and kind in _WITH_STATE and names_state(body) and _is_response(kind, body):
            return await self._continued(self._responses, body, hints, request.headers)
        if FILE_MARK in body:
            body = await self.with_files(body, hints.client)
        return self._parse(kind, body, hints)

    def chat(self, request: PlainRequest, facts: HeadFacts) -> ParsedRequest:
        """Parse a chat without files. Raises CausewayError, each a 4xx."""
        return self._parse("chat", arrived_body(request, self._max_body_bytes) or b"", facts.hints)

    def sampled_chat(self, request: PlainRequest, facts: HeadFacts) -> ParsedRequest | None:
        """Parse a chat or Message that no cache answers, without waiting; None if that is not possible, or if it must
        be refused. It is not remembered: an equal request gets an answer of its own.
        """
        body = request.body
        if len(body) > self._max_body_bytes or FILE_MARK in body:
            return None
        try:
            if request.path == MESSAGES:
                check_version(request.headers)
                return _parsed("message", body, facts.hints)
            if (plain := text_chat(body, facts.hints)) is not None:
                return ParsedRequest(plain.request, RequestMemo(), encoded=plain.encoded)
            return ParsedRequest(general_chat(body, facts.hints), RequestMemo())
        except CausewayError:
            return None

    async def _continued(
        self, responses: StoredResponses, body: bytes, hints: RoutingHints, headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Parse a request whose state is resolved first. What continues a private response stays on this
        device, and what continues a bound one in its regions.
        """
        cloud_key, history = headers.get(CLOUD_KEY, ""), self._history
        elsewhere = partial(history.read, cloud_key) if history is not None and cloud_key else None
        turn = await responses.begin(body, hints.client, headers.get("idempotency-key", ""), elsewhere)
        tags = (*turn.tags, *(() if tags_of_session(hints.tags) else turn.session_tags))
        if tags:
            hints = msgspec.structs.replace(hints, tags=folded_tags((*hints.tags, *tags)))
        if FILE_MARK in (body := turn.body if turn.resolved else body):
            request, echo = parse_response(await self.with_files(turn.body, hints.client), hints)
        else:
            request, echo = turn.parse(hints)
        if turn.private:
            request = bound_to_device(request)
        return ParsedRequest(request, RequestMemo(), turn.echo(echo), turn)

    def facts(self, request: HttpExchange) -> HeadFacts:
        """Return the facts of a request's head. Raises CausewayError, each a 4xx."""
        head = request.head if isinstance(request, PlainRequest) else None
        if head is not None and isinstance(head.facts, HeadFacts) and head.facts.hold:
            return head.facts
        headers, caller = request.headers, self.caller(request)
        ends = time.monotonic() + _IDENTIFIED_S if caller.is_issued else math.inf
        facts = HeadFacts(routing_hints(headers, caller), read_traceparent(headers), ends)
        check_media_type(headers.get("Content-Type"), headers.get("Content-Encoding"))
        if head is not None:
            head.facts = facts
        return facts

    async def with_files(self, body: bytes, client: str) -> bytes:
        """Return a body with the client's uploaded files in place of their ids. Raises as `BodyFiles.inline`."""
        return body if self._files is None else await self._files.inline(body, client, partial(self._room, client))

    def _parse(self, kind: Endpoint | None, body: bytes, hints: RoutingHints) -> ParsedRequest:
        if len(body) > _SHORT_BYTES:
            return _parsed(kind, body, hints)
        key = (kind, hashlib.sha256(body).digest(), hints)
        parsed = self._remembered.get(key)
        if parsed is None:
            parsed = _parsed(kind, body, hints)
            # Only a body that comes again is kept: the memory of the others is free, and in the caches, right away.
            self._remembered[key] = parsed if key in self._remembered else None
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return parsed

    async def body(self, request: HttpExchange) -> bytes:
        """Return the complete body. Raises InvalidRequest, BodyTooLarge, RequestTimeout or QueueFull."""
        body = arrived_body(request, self._max_body_bytes)
        return await self._arriving_body(request) if body is None else body

    async def _arriving_body(self, request: HttpExchange) -> bytes:
        assert not isinstance(request, PlainRequest)  # its body is here
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
        """Limit the memory of all partly received bodies together; yield the function that reserves a body's bytes."""
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
        request, echo = parse_response(body, hints)
        return ParsedRequest(request, RequestMemo(), echo)
    if endpoint == "message":
        request, terms = parse_messages(body, hints)
        return ParsedRequest(request, RequestMemo(), terms)
    if endpoint == "count":
        return ParsedRequest(parse_count(body, hints), RequestMemo())
    return ParsedRequest(_PARSERS[endpoint](body, hints), RequestMemo())


def _is_response(kind: Endpoint | None, body: bytes) -> bool:
    return (kind or _endpoint_of(body)) == "response"


def bound_to_device(request: Request) -> Request:
    """Return a request that continues a private response. Raises PermissionDenied if it asks for the cloud."""
    if request.hints.prefer == "only_cloud":
        raise PermissionDenied(
            "The conversation has private content, which stays on this device, so `only_cloud` is not possible.",
            param="prefer",
        )
    return msgspec.structs.replace(request, hints=msgspec.structs.replace(request.hints, prefer="only_on_device"))


def routing_hints(headers: Mapping[str, str], caller: Caller) -> RoutingHints:
    """Return the hints of all ``x-causeway-*`` header lines. Raise InvalidRequest if a name or value is unknown, or a
    header has two values: it may be meant to protect privacy.
    """
    if SESSION not in headers and not any(name[:11].lower() == OURS for name in headers):
        return _without_hints(caller.name, caller.tags, bounded_priority(None, caller.priority))
    lines = combined(headers.items())
    check_header_names(lines, _HEADERS)
    return RoutingHints(
        prefer=read_choice(lines, "x-causeway-prefer", _PREFERENCES),
        tags=(*caller.tags, *read_tags(lines.get(TAGS, "")), *read_session(lines.get(SESSION))),
        client=caller.name,
        deadline_ms=read_deadline_ms(lines.get(DEADLINE)),
        priority=bounded_priority(read_choice(lines, PRIORITY, RANK), caller.priority),
    )


@lru_cache(MAX_CLIENTS)
def _without_hints(client: str, tags: tuple[str, ...], priority: Priority | None) -> RoutingHints:
    return RoutingHints(client=client, tags=tags, priority=priority)


def bounded_priority(asked: Priority | None, most: Priority) -> Priority | None:
    """Return the priority of a request whose client may have at most `most`; None if nothing says which."""
    if most == "interactive":
        return asked
    return asked if asked is not None and RANK[asked] > RANK[most] else most


def _endpoint_of(body: bytes) -> Endpoint:
    """Return the kind of OpenAI's body; a malformed one counts as chat, whose parser reports the fault. `input` is for
    embeddings, unless it has messages or the body has a key that only a response has.
    """
    try:
        fields = msgspec.json.decode(body.removeprefix(BOM), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "chat"
    if "input" not in fields:
        return "completion" if "prompt" in fields else "chat"
    has_items = re.match(rb"\s*\[\s*\{", fields["input"]) is not None
    return "response" if has_items or not RESPONSE_ONLY.isdisjoint(fields) else "embedding"


class StatefulResponses(Protocol):
    """The handling of responses that are stored, or made in the background."""

    async def keep(self, context: RequestContext, turn: Turn, response: bytes) -> bool:
        """Store a response. Return whether it is stored. Raises CausewayError if the client was promised that."""
        ...

    async def in_background(self, http: HttpExchange, parsed: ParsedRequest, turn: Turn) -> ServerResponse:
        """Accept a response as a job. Raises CausewayError."""
        ...


@dataclass(eq=False, repr=False, kw_only=True)
class Api:
    """Routes requests to handlers, and handles requests for answers. `paths`: the methods of each path; `more_paths`:
    methods and handler of further ones, such as the console's; `{id}` stands for one step of a path, `{id:.*}` for the
    rest.
    """

    service: Service
    reader: RequestReader
    policies: PolicyStore
    records: Records
    tracing: RequestTracer | None
    more_paths: Mapping[str, tuple[str, Handler]]
    as_job: AsJob  # handler for requests with the header `Prefer`; it returns None if the header does not ask for a job
    heartbeat_s: float
    responses: StatefulResponses  # the handling of responses that are stored, or made in the background
    direct: DirectAnswers

    def __post_init__(self) -> None:
        self.hits = DirectHits(self.service)
        paths: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", functools.partial(self._answer, "chat")),
            "/v1/completions": ("POST", functools.partial(self._answer, "completion")),
            "/v1/embeddings": ("POST", functools.partial(self._answer, "embedding")),
            "/v1/responses": ("POST", functools.partial(self._answer, "response")),
            COMPACT_PATH: ("POST", functools.partial(self._answer, "response", compacts=True)),
            MESSAGES: ("POST", functools.partial(self._answer, "message")),
            COUNT_TOKENS: ("POST", self._count_tokens),
            TOKENIZE: ("POST", self._tokenize),
            DETOKENIZE: ("POST", self._detokenize),
            "/v1/route": ("POST", self._explain),
            **self.more_paths,
        }
        self.paths = {path.replace(_ANY_ID, _ID): methods for path, (methods, _) in paths.items()}
        self._paths = {path: handlers for path, handlers in paths.items() if "{" not in path}
        self._patterns = [(_pattern(path), handlers) for path, handlers in paths.items() if "{" in path]

    def begin(self, http: PlainRequest, connection: DirectConnection) -> DirectWork | None:
        """Begin the answer to a chat in callbacks, or send it; None: `handle` must, with `http.begun`."""
        policy, clock = self.service.direct_policy, self.records.clock
        if policy is None or http.path not in (_CHAT, MESSAGES) or self.tracing is not None:
            return None
        try:
            if _may_be_cached(http.body, policy):
                return self._begin_hit(http, connection)
            arrived, facts = clock.monotonic(), self.reader.facts(http)
            parsed = self.reader.sampled_chat(http, facts)
            if parsed is None:
                return None
            http.begun = parsed
            if log.isEnabledFor(logging.DEBUG):
                return None
            decision_id, unix = new_decision_id(), clock.unix()
            terms = parsed.echo if isinstance(parsed.echo, MessageTerms) else None
            arrival = Arrival(
                decision_id, parsed.request, parsed.memo, facts.traceparent, arrived, unix, parsed.encoded, terms
            )
            return self.direct.begin(arrival, http, connection)
        except CausewayError:
            return None  # `handle` refuses it
        except Exception as failure:  # `handle` meets it again, and can answer
            log.error("A chat could not begin on the fast path, so the general path answers: %s", redacted(failure))
            return None

    def _begin_hit(self, http: PlainRequest, connection: DirectConnection) -> DirectWork | None:
        """Answer a chat from memory, if that has a fresh answer."""
        if http.path != _CHAT or FILE_MARK in http.body or connection.writing_paused or log.isEnabledFor(logging.DEBUG):
            return None
        ids = new_decision_id(), self.records.clock.monotonic()
        parsed = http.begun = self.reader.chat(http, self.reader.facts(http))
        return ANSWERED if self.hits.answer(parsed.request, parsed.memo, ids, http) else None

    async def handle(self, http: HttpExchange) -> ServerResponse:
        """Handle one request. Raises only CancelledError, when the client disconnects."""
        try:
            if isinstance(http, PlainRequest) and isinstance(begun := http.begun, DirectAnswer):
                return await self._reply(*begun.context(), is_begun=True)  # it was admitted when it was begun
            if self.reader.issuers is not None:
                await self.reader.ready(read_credential(http))
            return await self._handler(http)(http)
        except ClientGone:
            raise asyncio.CancelledError from None
        except CausewayError as error:
            if http.path in _ANSWER_PATHS:
                self.records.metrics.request_rejected(error.code)
            return _refusal(http, error)
        except Exception as failure:
            log.error("The request to %s failed unexpectedly: %s", http.path, redacted(failure))
            return _refusal(http, CausewayError("Internal error."))

    def _handler(self, http: HttpExchange) -> ExchangeHandler:
        """Return the handler of a request. Raises NotFound or MethodNotAllowed."""
        if isinstance(http, PlainRequest):
            return cast("ExchangeHandler", self._paths[http.path][1])  # its method and path are plain ones
        handlers = self._paths.get(http.raw_path) or self._paths.get(http.path)
        if handlers is None:
            handlers = next((entry for pattern, entry in self._patterns if pattern.fullmatch(http.path)), None)
        if handlers is None:
            raise NotFound(f"There is nothing at {http.path[:200]}{self._advice(http.path)}")
        methods, handler = handlers
        if http.method != methods and served_method(http.method, http.headers) not in methods.split(", "):
            allowed = allowed_methods(methods)
            raise MethodNotAllowed(f"{http.path[:200]} supports {allowed}, not {http.method[:20]}.", allow=allowed)
        return cast("ExchangeHandler", handler)

    def _advice(self, path: str) -> str:
        """Return a hint at the existing path, if a client's base URL lacks `/v1`, or contains it twice."""
        if path in ("/", "/v1"):
            return "; the API is under /v1, the page at /console"
        near = next((one for one in (f"/v1{path}", path.removeprefix("/v1")) if one in self._paths), "")
        return f"; did you mean {near}?" if near else ""

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _answer(self, kind: Endpoint, http: HttpExchange, *, compacts: bool = False) -> ServerResponse:
        arrived = self.records.clock.monotonic()
        if not isinstance(http, PlainRequest) and "Prefer" in http.headers:
            response = await self.as_job(http)
            if response is not None:
                return response
        if kind == "message":
            check_version(http.headers)
        facts = self.reader.facts(http)
        begun = http.begun if isinstance(http, PlainRequest) else None
        parsed = begun if isinstance(begun, ParsedRequest) else None
        parsed = parsed or await self.reader.request(http, kind, facts, compacts=compacts)
        turn = parsed.turn
        if turn is not None and turn.request.background:
            return await self.responses.in_background(http, parsed, turn)
        request, decision_id, traceparent = parsed.request, new_decision_id(), facts.traceparent
        unix = self.records.clock.unix()
        trace = self.tracing.begin(request, traceparent, unix) if self.tracing is not None else None
        reply = HttpReplyWriter(
            request,
            http,
            device_header_lines,
            id=decision_id,
            created=int(unix),
            echo=_compacting(parsed.echo) if compacts else parsed.echo,
            heartbeat_s=self.heartbeat_s,
            id_headers=ID_HEADERS,
            temperature=lambda head: head.temperature,
        )
        context = RequestContext(
            request, reply, id=decision_id, arrived=arrived, traceparent=traceparent, trace=trace, memo=parsed.memo
        )
        if turn is not None and turn.store:
            reply.keep = partial(self.responses.keep, context, turn)
        if compacts:
            reply.compacted = lambda: (context.generation.on_device, region_tags(context.generation.regions))
        return await self._reply(context, reply)

    async def _reply(
        self, context: RequestContext, reply: HttpReplyWriter[AnswerHead], *, is_begun: bool = False
    ) -> ServerResponse:
        """Answer a request. `is_begun`: whether its answer was begun in callbacks."""
        decision_id = context.id
        try:
            await self.service.answer(context, is_begun=is_begun)
            return reply.response
        except ClientGone:
            raise
        except CausewayError as error:
            headers = dict.fromkeys(ID_HEADERS, decision_id)
            headers["x-causeway-policy"] = policy_label(self.policies.active)
            return await reply.fail(error, headers)

    async def _count_tokens(self, http: HttpExchange) -> ServerResponse:
        check_version(http.headers)
        parsed = await self.reader.request(http, "count")
        target, found = await self.service.tokenize(TokenizeRequest(parsed.request))
        return json_response(TokenCount(found.count), headers={_TARGET: target})

    async def _tokenize(self, http: HttpExchange) -> ServerResponse:
        hints, body = self.reader.facts(http).hints, await self.reader.body(http)
        target, found = await self.service.tokenize(parse_tokenize(body, hints))
        return json_response(found, headers={_TARGET: target})

    async def _detokenize(self, http: HttpExchange) -> ServerResponse:
        hints, body = self.reader.facts(http).hints, await self.reader.body(http)
        asked = parse_detokenize(body)
        target, text = await self.service.detokenize(asked.request(hints), tuple(asked.tokens))
        return json_response(DetokenizedText(text), headers={_TARGET: target})

    async def _explain(self, http: HttpExchange) -> ServerResponse:
        parsed = await self.reader.request(http, "message" if VERSION_HEADER in http.headers else None)
        return json_response(await self.service.explain(parsed.request))


def _may_be_cached(body: bytes, policy: Policy) -> bool:
    """Return whether a chat may be cached, as far as its bytes tell."""
    if not policy.cache or _SAMPLED.search(body):
        return False
    return not policy.default_temperature or _TEMPERATURE in body


def _compacting(echo: Echo | None) -> ResponseEcho:
    assert isinstance(echo, ResponseEcho)
    return msgspec.structs.replace(echo, compacts=True)


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", path.replace(_ANY_ID, ".*")))


def _refusal(http: HttpExchange, error: CausewayError) -> ServerResponse:
    """Return the answer to a request that has no decision, and log both under one id."""
    request_id = new_decision_id()
    log.debug(
        "The request to %s was refused: HTTP %s (%s), request id %s.", http.path, error.status, error.code, request_id
    )
    return refusal(http, error, request_id, {"x-request-id": request_id})


def new_decision_id() -> str:
    """Return a new decision id: unique, but not secret. It begins with the time, so that files append their rows."""
    return f"{int(time.time() * 1000.0):012x}{_random.getrandbits(48):012x}"
