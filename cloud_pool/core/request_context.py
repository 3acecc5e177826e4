"""Input and output of the service, and the memory held by the requests in progress."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from causeway_server.router.decision.sessions import SessionTurn
from causeway_server.router.errors import (
    CausewayError,
    ConfigError,
    QueueFull,
    RateLimited,
    SessionTargetUnavailable,
    Shed,
)
from causeway_server.router.residency import region_tags
from causeway_server.router.serving.logs import REQUEST
from causeway_server.router.serving.metrics import described
from causeway_server.router.trackers import FairShare
from causeway_server.router.types import Chunk, Request, folded_tags

from ..admission import Priority
from ..tiers.tier import Tier
from ..upstreams.inference import TokenMeter

if TYPE_CHECKING:
    from causeway_server.models.parts.graph.branch import Memory
    from causeway_server.router.serving.egress.ledger import EgressLedger

    from ..observability.tracing import Trace
    from .principal import Principal

_TIER_HEADER = "x-causeway-tier"
REASON_HEADER = "x-causeway-tier-reason"
_LOOSENED_HEADER = "x-causeway-loosened"
TRIMMED_HEADER = "x-causeway-trimmed"
VARIANT_HEADER = "x-causeway-variant"
REGION_HEADER = "x-causeway-region"
DEGRADED = ("x-causeway-degraded", "true")


class TierTurn(msgspec.Struct, frozen=True):
    """A request's turn in its session, at this gateway."""

    turn: SessionTurn
    tenant: str
    pinned: str = ""  # tier that is to answer; "": any
    variant: str = ""  # its variant; "": its own model
    only: bool = False  # whether no other may answer

    def bound(self, request: Request) -> Request:
        """Return the request with the regions to which its session is bound."""
        tags = region_tags(self.turn.session.regions)
        if not tags:
            return request
        hints = msgspec.structs.replace(request.hints, tags=folded_tags((*request.hints.tags, *tags)))
        return msgspec.structs.replace(request, hints=hints)

    def gone(self, why: str, retry_after_s: float | None = None) -> SessionTargetUnavailable:
        """Return the error if the only tier cannot answer."""
        name = f"{self.pinned} ({self.variant})" if self.variant else self.pinned
        message = f"The session stays at `{name}` (`degradation.sessions.mode: require`). {why}"
        return SessionTargetUnavailable(message, retry_after_s=retry_after_s)


class RequestGuard(Protocol):
    """The rules of the guard for one request."""

    async def check(self, request: Request) -> Request:
        """Return the request as a tier may get it. Raises GuardRefused or GuardFailed."""
        ...


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, with the tier that it named."""

    id: str
    request: Request
    tier: Tier
    deadline: float  # monotonic seconds
    priority: Priority = "standard"
    traceparent: str = ""
    trace: Trace | None = None
    tenant: str = ""
    weight: float = 1.0  # weight of the tenant's share among waiting requests
    tokens: float = 1.0  # estimated tokens of a sequence, prompt and answer together
    # whether only the named tier's full answer is acceptable: no fallback, no truncation, no stale answer
    critical: bool = False
    allowed_tiers: frozenset[str] | None = None  # tiers that the caller may use, also as fallback; None for all
    # memory of parts that a live session owns; None for the tenant's, or for none if the request is private
    memory: Memory | None = None
    session: TierTurn | None = None  # None: sessions are off
    guard: RequestGuard | None = None  # checks what tiers get; None: there are no rules
    meter: TokenMeter = msgspec.field(default_factory=TokenMeter)  # counter of upstream cost

    @property
    def is_exclusive(self) -> bool:
        """Whether only an answer of one tier is acceptable."""
        return self.critical or (self.session is not None and self.session.only)

    def pinned_error(self, error: CausewayError) -> CausewayError:
        """Return the error of the last tier; one that names the tier if no other may answer the session."""
        if self.session is None or not self.session.only:
            return error
        return self.session.gone(error.message, error.retry_after_s)


class AnswerHead(msgspec.Struct, frozen=True):
    """The response headers that describe an answer, known with its first chunk and equal for all its clients.

    `keep`: False for a fallback answer, which is for the waiting clients only and not for the cache. `stale_s`: age of
    a stale answer that is used instead of an error.
    """

    headers: tuple[tuple[str, str], ...] = ()
    keep: bool = True
    stale_s: float | None = None

    @property
    def model(self) -> str:
        """The name of the answering tier for clients; "" if the headers do not name it."""
        return self.header(_TIER_HEADER)

    def header(self, name: str) -> str:
        """Return the value of a header; "" if it has none."""
        for known, value in self.headers:
            if known == name:
                return value
        return ""


Piece = AnswerHead | Chunk
"""A piece of an answer. The first piece is an AnswerHead; Chunks follow."""
Generate = Callable[[RequestContext], AsyncGenerator[Piece, None]]
"""The type of `Service.answer`. Raises CausewayError; closing the generator stops the work in Triton."""


class CachedAnswer(msgspec.Struct, frozen=True):
    """A stored answer, each choice in one chunk."""

    head: AnswerHead
    chunks: tuple[Chunk, ...]
    age_s: float


def answer_head(
    tier: str,
    reason: str,
    *,
    degraded: bool = False,
    keep: bool = True,
    stale_s: float | None = None,
    loosened: str = "",
    variant: str = "",
    region: str = "",
) -> AnswerHead:
    """Build the head of an answer by `tier`; a degraded answer is never kept.

    `loosened`: offered tools whose arguments are not constrained to their schemas. `variant`, `region`: the tier's.
    """
    headers: tuple[tuple[str, str], ...] = ((_TIER_HEADER, tier), (REASON_HEADER, reason))
    if loosened:
        headers = (*headers, (_LOOSENED_HEADER, loosened))
    if variant:
        headers = (*headers, (VARIANT_HEADER, variant))
    if region:
        headers = (*headers, (REGION_HEADER, region))
    return AnswerHead((*headers, DEGRADED) if degraded else headers, keep and not degraded, stale_s)


FREE_BYTES = 64 * 1024
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
DEFAULT_MAX_REQUESTS = 4096
_RETRY_AFTER_S = 1.0


RECEIPT: ContextVar[str] = ContextVar("RECEIPT", default="")
"""The receipt of the egress ledger for the request of this task; "" if there is none."""


class Arrivals:
    """The egress ledger of what arrives at this gateway. `region`: the gateway's."""

    def __init__(self, ledger: EgressLedger, region: str) -> None:
        self.ledger, self._region = ledger, region

    def note(self, body: bytes, principal: Principal, *, private: bool, claim: str = "") -> None:
        """Record a body, and keep the receipt for the answer. `claim`: the device's header."""
        receipt = self.ledger.arrived(claim, body, REQUEST.get(), principal.owner, self._region, private=private)
        RECEIPT.set(receipt)


class BodyMemory:
    """Accounts for requests in progress, and for the bytes of large bodies and of audio in sessions.

    Each is a pool with a share for each caller (`router.trackers`). A body counts until its request ends, since the
    parsed request holds most of it. Bodies of up to FREE_BYTES do not count: the number of connections bounds these,
    and a flood of large bodies does not keep small requests out. A chunked body, whose size is unknown, counts as at
    least FREE_BYTES.

    Args:
        max_requests: Number of connections that may have a request in progress.
        arrivals: The egress ledger, which notes each body; None: there is none.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        registry: CollectorRegistry | None = None,
        max_requests: int = DEFAULT_MAX_REQUESTS,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.arrivals = arrivals
        self.max_bytes = max_bytes
        self._bytes = FairShare(max_bytes)
        self._requests = FairShare(max_requests)
        if registry is not None:
            described(Gauge, registry, "causeway_gateway_body_bytes").set_function(lambda: self.held_bytes)

    @property
    def held_bytes(self) -> int:
        return self._bytes.held

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return self._requests.held

    def check_largest(self, largest: int) -> None:
        """Raise ConfigError if a tenant's share could never hold a body of `largest` bytes."""
        if largest > self.max_bytes // 2:
            raise ConfigError(
                f"Set at least {2 * largest} bytes (twice server.max_body_bytes), because one tenant may use only "
                "half of this memory.",
                where="server.max_body_memory_bytes",
            )

    def enter(self, request: object, caller: str) -> None:
        """Count a request in progress until `release`. Raises QueueFull if its caller has used up its share."""
        if not self._requests.hold(id(request), caller):
            raise QueueFull(
                f"Your tenant has {self._requests.held_by(caller)} requests in progress on this gateway, which is its "
                f"share of {self._requests.capacity} connections. Wait until some of them end.",
                retry_after_s=_RETRY_AFTER_S,
            )

    def hold(self, request: object, caller: str, size: int) -> None:
        """Count `size` bytes for a request, replacing its previous amount, until `release`.

        Raises RateLimited beyond the caller's share of the memory, Shed beyond the memory for all.
        """
        pool = self._bytes
        if pool.hold(id(request), caller, size):
            return
        if pool.held_by(caller):
            raise RateLimited(
                f"Your tenant's request bodies and audio take {pool.held_by(caller)} bytes, and {size} "
                f"more would exceed its share of {self.max_bytes} bytes (server.max_body_memory_bytes). "
                "Send fewer large requests at the same time.",
                retry_after_s=_RETRY_AFTER_S,
            )
        raise Shed(
            f"The request bodies in progress take {pool.held} of {self.max_bytes} bytes "
            "(server.max_body_memory_bytes), so there is no room for the body of this request now.",
            retry_after_s=_RETRY_AFTER_S,
        )

    def release(self, request: object) -> None:
        """Stop counting a request that has ended, if it was counted."""
        self._requests.release(id(request))
        if self._bytes.held:
            self._bytes.release(id(request))
