"""Responses of a gateway that stores them: resolved and stored around an answer, made as jobs, and read again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

import msgspec

from causeway_server.router.errors import IdentityUnavailable, OutsideRegion
from causeway_server.router.openai.responses.compaction import COMPACT_PATH, compaction_request
from causeway_server.router.openai.responses.request import ResponseEcho, parse_response
from causeway_server.router.openai.responses.state import StoredTurn, Turn, names_state
from causeway_server.router.parts.uploads import FILE_MARK
from causeway_server.router.residency import region_tags, regions_of
from causeway_server.router.serving.request import TAGS, AiohttpRequest, HttpExchange, read_credential, read_tags
from causeway_server.router.serving.responses import Handler, KeepResponse, ServerResponse
from causeway_server.router.serving.stored.api import StoredResponseApi, check_method, methods_of
from causeway_server.router.session_tags import tags_of_session
from causeway_server.router.types import Request, RoutingHints, folded_tags

from ..accounts.ledger import LedgerEntry
from ..accounts.tenants.config import TenantLimits
from ..core.principal import Principal
from .request_admission import RequestAdmission, RequestHeaders, read_headers

ACCEPTED: Final = "accepted"


class StartGatewayResponse(Protocol):
    """Accepts the job of a response in the background."""

    async def __call__(self, principal: Principal, headers: RequestHeaders, name: str, body: bytes, /) -> None:
        """Accept the job of the response `name`. Raises CausewayError."""
        ...


class ParsedResponse(msgspec.Struct, frozen=True):
    """A request for a response, its caller and the facts of its head."""

    request: Request
    echo: ResponseEcho
    turn: Turn | None  # None if it names no state and is not stored
    size_bytes: int
    principal: Principal
    headers: RequestHeaders

    @property
    def region_tags(self) -> tuple[str, ...]:
        """The tags that bind what continues the response to regions."""
        return region_tags(regions_of(folded_tags(self.request.hints.tags)))

    @property
    def in_background(self) -> bool:
        return self.turn is not None and self.turn.request.background


class CheckStore(Protocol):
    """Checks that a response may be in the store."""

    def __call__(self, tags: Iterable[str], limits: TenantLimits, /) -> object:
        """Raise OutsideRegion if the tags or the tenant bind a response to regions in which the store is not."""


class GatewayResponses:
    """The state of responses at a gateway. `start`: accepts jobs."""

    def __init__(
        self, api: StoredResponseApi, admission: RequestAdmission, start: StartGatewayResponse, check_store: CheckStore
    ) -> None:
        self.api = api
        self._admission = admission
        self._start = start
        self._check_store = check_store

    async def parse(self, http: HttpExchange, entry: LedgerEntry) -> ParsedResponse:
        """Authenticate, read and parse a request, with its state resolved. Raises CausewayError."""
        admission, stored, turn = self._admission, self.api.stored, None
        principal = admission.caller(read_credential(http), entry, http)
        headers = read_headers(http.headers.items())
        body, compacts = await admission.read(http, principal), http.path == COMPACT_PATH
        body = compaction_request(body) if compacts else body
        if stored.by_default or names_state(body):
            turn = await stored.begin(body, principal.owner, http.headers.get("idempotency-key", ""))
            body = turn.body if turn.resolved or FILE_MARK in body else body
        whole = await admission.with_files(body, principal, http)
        hints = RoutingHints(client=principal.device, deadline_ms=headers.deadline_ms, tags=headers.tags)
        named = () if turn is None or tags_of_session(hints.tags) else turn.session_tags
        if turn is not None and (turn.tags or named):
            hints = msgspec.structs.replace(hints, tags=folded_tags((*hints.tags, *turn.tags, *named)))
        request, echo = parse_response(whole, hints) if turn is None or whole is not body else turn.parse(hints)
        turn = None if turn is None else self._in_regions(turn, request, principal)
        echo = msgspec.structs.replace(echo if turn is None else turn.echo(echo), compacts=compacts)
        return ParsedResponse(request, echo, turn, len(whole), principal, headers)

    def _in_regions(self, turn: Turn, request: Request, principal: Principal) -> Turn:
        """Return the turn, unstored if only the default stores it, outside its regions. Raises OutsideRegion."""
        reads = turn.chain or turn.request.conversation or turn.request.references
        if not (turn.store or reads):
            return turn
        try:
            self._check_store(request.hints.tags, self._admission.ledger.limits(principal))
        except OutsideRegion:
            if turn.required or reads:
                raise
            return msgspec.structs.replace(turn, store=False)
        return turn

    def keep(self, parsed: ParsedResponse) -> KeepResponse | None:
        """Return the function that stores the response; None if it is not stored."""
        turn = parsed.turn
        if turn is None or not turn.store:
            return None
        return partial(self.api.stored.keep, parsed.principal.owner, turn, tags=parsed.region_tags)

    async def accept(self, http: HttpExchange, parsed: ParsedResponse, entry: LedgerEntry) -> ServerResponse:
        """Accept a response in the background as a job. Raises CausewayError."""
        principal, turn = parsed.principal, parsed.turn
        assert turn is not None
        principal.require("jobs")
        await self._admission.ledger.admit_submission(principal)
        tags, model = parsed.region_tags, parsed.request.model
        named = tags_of_session(parsed.request.hints.tags)
        headers = msgspec.structs.replace(parsed.headers, tags=folded_tags((*parsed.headers.tags, *tags, *named)))
        start = partial(self._start, principal, headers)
        await self.api.stored.accept(principal.owner, turn, parsed.echo, model, start, tags)
        entry.outcome = ACCEPTED
        if turn.request.stream:
            return await self.api.follow(http, principal.owner, turn.id, partial(self._served, http))
        return await self.api.show(principal.owner, turn.id)

    def handler(self, http: AiohttpRequest) -> Handler | None:
        """Return the handler of a request; None for another path. Raises MethodNotAllowed."""
        methods = methods_of(http.path)
        if not methods:
            return None
        check_method(http, methods)
        return self._handle

    async def _handle(self, http: AiohttpRequest) -> ServerResponse:
        admission = self._admission
        principal = admission.principal(http)
        principal.require("chat")
        tags = read_tags(http.headers.get(TAGS, ""))

        async def bind(items: StoredTurn) -> StoredTurn:
            return msgspec.structs.replace(items, tags=region_tags(regions_of(tags)))

        self._check_store(tags, admission.ledger.limits(principal))  # content leaves the store
        await admission.ledger.admit_reads(principal, 1)
        read = partial(admission.read, http, principal)
        return await self.api.handle(http, principal.owner, read, partial(self._served, http), bind)

    def _served(self, http: HttpExchange) -> bool:
        """Return whether a stream may go on. Raises AuthenticationFailed once its token has expired or is revoked."""
        with suppress(IdentityUnavailable):  # It was accepted, and nothing says that it was revoked since.
            self._admission.authenticator.identify(http)
        return not self._admission.draining
