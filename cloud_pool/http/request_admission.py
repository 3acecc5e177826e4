"""Admission of a request: authentication, headers parsed once, the bounded body, and the limits of its tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from causeway_server.router.errors import BodyTooLarge, Draining
from causeway_server.router.ledger.log import HEADER as EGRESS
from causeway_server.router.openai.audio import check_form
from causeway_server.router.openai.request_body import check_header_names, check_media_type
from causeway_server.router.parts.reading import text_bytes
from causeway_server.router.parts.uploads import FILE_MARK
from causeway_server.router.residency import check_region, regions_of
from causeway_server.router.serving.request import (
    DEADLINE,
    PRIORITY,
    TAGS,
    HttpExchange,
    PlainRequest,
    arrived_body,
    client_certificate,
    combined,
    members,
    read_choice,
    read_credential,
    read_deadline_ms,
    read_tags,
    read_traceparent,
    receive_body,
)
from causeway_server.router.serving.tls.peers import PeerCertificate
from causeway_server.router.session_tags import HEADER as SESSION
from causeway_server.router.session_tags import read_session
from causeway_server.router.types import Request, RoutingHints, folded_tags

from ..accounts.identity.authenticator import Authenticator
from ..accounts.ledger import BYTES_PER_TOKEN, Ledger, LedgerEntry
from ..admission import RANK, Priority
from ..cache.shared_cache import NO_STORE
from ..core.principal import Principal
from ..core.request_context import FREE_BYTES, BodyMemory, RequestContext
from ..degradation.tier_sessions import TierSessions
from ..tiers.tier import AllowedTiers, Tier, allowed_tiers, find_tier, in_regions
from .config import ServerConfig

if TYPE_CHECKING:
    from ..observability.tracing import Tracing

_HEADERS = frozenset(
    f"x-causeway-{name}"
    for name in ("deadline-ms", "priority", "critical", "tags", "policy")  # policy: for the ledger
)
_CACHE_BYPASS = {"no-store", "no-cache", "private", "max-age=0"}


class RequestHeaders(msgspec.Struct, frozen=True):
    deadline_ms: int | None
    priority: Priority
    traceparent: str
    critical: bool  # only the requested tier's full answer will do
    tags: tuple[str, ...] = ()  # as `folded_tags`


class CallerFacts(msgspec.Struct, frozen=True):
    """The facts in a plain head, kept for the next request with it on its connection."""

    credential: str
    headers: RequestHeaders
    principal: Principal | None  # None: to be authenticated each time, by a signed token or a certificate


def read_headers(lines: Iterable[tuple[str, str]]) -> RequestHeaders:
    """Parse our headers and the trace context; a malformed `traceparent` is ignored, as its specification asks.

    `lines`: a name may occur more than once. Raises InvalidRequest for a malformed, misspelt or doubled header of ours.
    """
    headers = combined(lines)
    check_header_names(headers, _HEADERS)
    return RequestHeaders(
        deadline_ms=read_deadline_ms(headers.get(DEADLINE)),
        priority=read_choice(headers, PRIORITY, RANK) or "standard",
        traceparent=read_traceparent(headers),
        critical=read_choice(headers, "x-causeway-critical", ("true", "false")) == "true",
        tags=folded_tags(
            (
                *read_tags(headers.get(TAGS, "")),
                *_cache_tags(headers.get("cache-control", "")),
                *(read_session(headers[SESSION]) if SESSION in headers else ()),
            )
        ),
    )


async def read_body(
    http: HttpExchange,
    max_bytes: int,
    timeout_s: float,
    memory: BodyMemory,
    principal: Principal,
    *,
    form: bool = False,
) -> bytes:
    """Read the whole body, which must be declared as plain JSON, or as a multipart form.

    Large bodies count in `memory`, before they are read if the size is known; the caller releases them.

    Raises:
        UnsupportedMediaType: The headers declare another type, or compression.
        BodyTooLarge, RequestTimeout: The body exceeds `max_bytes`, or did not arrive within `timeout_s`.
        InvalidRequest: The transfer encoding is malformed.
        RateLimited, Shed: The caller has used up its share of the memory, or all tenants all of it.
    """
    check = check_form if form else check_media_type
    check(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))

    def hold(size: int) -> None:
        if size > FREE_BYTES or http.content_length is None:  # of an unknown size, it counts from the beginning
            memory.hold(http, principal.caller, max(size, FREE_BYTES))

    body = arrived_body(http, max_bytes)
    if body is None:
        assert not isinstance(http, PlainRequest)  # its body is here
        body = await receive_body(http, max_bytes, timeout_s, hold)
    else:
        if len(body) > FREE_BYTES or not isinstance(http, PlainRequest):
            hold(len(body))
    if memory.arrivals is not None:
        private = any(tag.casefold() == "private" for tag in members(http.headers.getall(TAGS, ())))
        memory.arrivals.note(body, principal, private=private, claim=http.headers.get(EGRESS, ""))
    return body


def _cache_tags(cache_control: str) -> list[str]:
    """Return the tags of Cache-Control; refusing to read or to store bypasses the cache both ways."""
    directives = {word.lower() for word in members([cache_control])}
    return [NO_STORE] if directives & _CACHE_BYPASS else []


Parse = Callable[[bytes, RoutingHints], Request]
InlineFiles = Callable[[bytes, str, int, Callable[[int], None]], Awaitable[bytes]]
"""Type of `NamedFileReader.inline`: body, owner, size limit and memory reservation to the inlined body."""


class RequestAdmission(msgspec.Struct):
    """Admission of HTTP requests."""

    config: ServerConfig
    tiers: Mapping[str, Tier]  # by name and alias
    authenticator: Authenticator
    ledger: Ledger  # with the limits of tenants
    bodies: BodyMemory  # bounds the bodies in memory; the server releases them
    critical_tenants: Collection[str] = ()  # whose requests are all critical
    tracing: Tracing | None = None  # None without a collector
    inline_files: InlineFiles | None = None  # puts uploaded files in place of their ids; None: there are no files here
    draining: bool = False
    region: str = ""  # of this gateway
    sessions: TierSessions | None = None  # None: sessions are off

    def principal(self, http: HttpExchange) -> Principal:
        """Authenticate the caller. Raises AuthenticationFailed, IdentityUnavailable or QueueFull."""
        principal = self.authenticator.identify(http)
        self.bodies.enter(http, principal.caller)
        return principal

    def check_model(self, model: str, principal: Principal) -> None:
        """Check that the caller may use the model. Raises ModelNotFound or ModelNotAllowed."""
        find_tier(self.tiers, model, self.allowed(principal))

    def allowed(self, principal: Principal) -> AllowedTiers:
        """Return the tiers that the caller may use."""
        return allowed_tiers(self.tiers, self.ledger.limits(principal).models, principal.grants.models)

    def tier_of(self, request: Request, principal: Principal) -> Tier:
        """Return the tier that a request names. Raises ModelNotFound, ModelNotAllowed or OutsideRegion."""
        tier = find_tier(self.tiers, request.model, self.allowed(principal))
        regions = regions_of(self.ledger.limits(principal).bounded(request).hints.tags)
        check_region(regions, self.region, "this gateway (identity.region)")
        check_region(regions, tier.config.region, f"the tier {tier.name} (tiers.region)")
        return tier

    def max_body_bytes(self, principal: Principal) -> int:
        """Return the size of the largest body that the caller may send."""
        return self.ledger.config.limits(principal.tenant).body_bytes(self.config.max_body_bytes)

    def caller(
        self,
        authorization: str,
        entry: LedgerEntry,
        http: HttpExchange | None = None,
        certificate: PeerCertificate | None = None,
        known: Principal | None = None,
    ) -> Principal:
        """Authenticate the caller of a request that generates.

        Args:
            http: Request to count among those in progress; None: it is counted elsewhere.
            certificate: The verified certificate of the client, without `http`.
            known: The caller, if it is authenticated already.

        Raises:
            QueueFull: The caller has used up its share of the requests in progress.
            AuthenticationFailed, IdentityUnavailable: The token is not valid, or cannot be verified now.
            PermissionDenied, Draining: The token may not generate; the gateway is shutting down.
        """
        if http is not None and known is None:
            certificate = client_certificate(http)
        principal = entry.principal = known or self.authenticator.principal(authorization, certificate)
        principal.require("chat")
        if http is not None:
            self.bodies.enter(http, principal.caller)
        if self.draining:
            raise Draining("This gateway is shutting down.", retry_after_s=1.0)
        return principal

    async def read(self, http: HttpExchange, principal: Principal, *, form: bool = False) -> bytes:
        """Return the whole body: JSON, or a multipart form. Raises like `read_body`."""
        max_bytes, timeout_s = self.max_body_bytes(principal), self.config.read_timeout_s
        return await read_body(http, max_bytes, timeout_s, self.bodies, principal, form=form)

    async def with_files(self, body: bytes, principal: Principal, request: object) -> bytes:
        """Return a body, counted for `request`, with the caller's files in place of their ids. Raises CausewayError."""
        if self.inline_files is None or FILE_MARK not in body:
            return body
        hold = partial(self.bodies.hold, request, principal.caller)
        return await self.inline_files(body, principal.owner, self.max_body_bytes(principal), hold)

    async def admit(self, http: HttpExchange, parse: Parse, arrived_at: float, entry: LedgerEntry) -> RequestContext:
        """Authenticate, parse and admit a request of `arrived_at` (monotonic s). Raises CausewayError."""
        return await self.admit_caller(http, parse, arrived_at, entry, *self.identify(http, entry))

    def identify(self, http: HttpExchange, entry: LedgerEntry) -> tuple[Principal, RequestHeaders]:
        """Authenticate a request that generates, and parse its headers. Raises as `caller`, and InvalidRequest."""
        head = http.head if isinstance(http, PlainRequest) else None
        facts = None if head is None else head.facts
        known = facts if isinstance(facts, CallerFacts) else None
        credential = read_credential(http) if known is None else known.credential
        principal = self.caller(credential, entry, http, known=None if known is None else known.principal)
        inbound = read_headers(http.headers.items()) if known is None else known.headers
        if head is not None and known is None:
            is_static = not principal.token_id and client_certificate(http) is None
            head.facts = CallerFacts(credential, inbound, principal if is_static else None)
        return principal, inbound

    def admits_now(self, http: PlainRequest, principal: Principal) -> bool:
        """Return whether `admit_caller` waits for nothing."""
        names_files = self.inline_files is not None and FILE_MARK in http.body
        return self.sessions is None and not names_files and self.ledger.limiter.decides_now(principal)

    async def admit_caller(
        self,
        http: HttpExchange,
        parse: Parse,
        arrived_at: float,
        entry: LedgerEntry,
        principal: Principal,
        inbound: RequestHeaders,
    ) -> RequestContext:
        """Parse and admit a request of an authenticated caller. Raises CausewayError."""
        max_bytes = self.ledger.config.limits(principal.tenant).body_bytes(self.config.max_body_bytes)
        body = await read_body(http, max_bytes, self.config.read_timeout_s, self.bodies, principal)
        if self.inline_files is not None:
            body = await self.with_files(body, principal, http)
        parsed = parse(body, RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags))
        return await self.admit_parsed(parsed, inbound, len(body), principal, arrived_at, entry)

    async def admit_parsed(
        self,
        parsed: Request,
        inbound: RequestHeaders,
        size_bytes: int,
        principal: Principal,
        arrived_at: float,
        entry: LedgerEntry,
    ) -> RequestContext:
        """Check a request against its tier and its tenant's limits, and reserve its cost. Raises CausewayError."""
        if self.sessions is not None:
            await self.sessions.bind(parsed, principal.tenant, principal.owner)
        limits, models = self.ledger.config.limits(principal.tenant), principal.grants.models
        allowed = None
        if limits.models or models is not None:
            allowed = allowed_tiers(self.tiers, limits.models, models)
        max_bytes = limits.body_bytes(self.config.max_body_bytes)
        if size_bytes > max_bytes:  # of a live session or a call, whose requests are read from no body
            raise BodyTooLarge(f"The request has {size_bytes} bytes; at most {max_bytes} are allowed.")
        tier = find_tier(self.tiers, parsed.model, allowed)
        if principal.grants.modalities is not None:
            principal.grants.require_modalities(parsed)
        limits.check_request(parsed)
        request = limits.bounded(parsed)
        session = None
        if self.sessions is not None:
            session = await self.sessions.find(request, principal.tenant, principal.owner, tier.name)
            request = request if session is None else session.bound(request)
        if request.hints.tags:
            regions = regions_of(request.hints.tags)
            check_region(regions, self.region, "this gateway (identity.region)")
            allowed = in_regions(self.tiers, allowed, regions)
        entry.tier = tier.config.name
        tier.check_sequences(request)
        size_bytes = text_bytes(request, size_bytes)  # the model gets a part as some words
        deadline_s, max_tokens = self.deadline_s(request), tier.max_tokens
        await self.ledger.admit(entry, principal, request, size_bytes, max_tokens=max_tokens, lifetime_s=deadline_s)
        answer_tokens = 0 if request.kind == "embedding" else request.max_tokens or max_tokens
        return RequestContext(
            id=entry.id,
            request=request,
            tier=tier,
            deadline=arrived_at + deadline_s,
            priority=principal.grants.bounded_priority(inbound.priority),
            traceparent=inbound.traceparent,
            trace=None if self.tracing is None else self.tracing.begin(request, entry.id, inbound.traceparent),
            tenant=principal.tenant,
            weight=limits.weight,
            tokens=size_bytes / BYTES_PER_TOKEN / (len(request.prompts) or 1) + answer_tokens,
            critical=(inbound.critical and principal.grants.critical) or principal.tenant in self.critical_tenants,
            allowed_tiers=allowed,
            session=session,
        )

    def deadline_s(self, request: Request) -> float:
        """Return the time that a request may take, in seconds."""
        if request.hints.deadline_ms is None:
            return self.config.default_deadline_s
        return min(request.hints.deadline_ms / 1000.0, self.config.default_deadline_s)
