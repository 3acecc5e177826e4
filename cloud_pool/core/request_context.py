"""Input and output of the service, and the memory held by the requests in progress."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from causeway_server.router.errors import ConfigError, QueueFull, RateLimited, Shed
from causeway_server.router.trackers import FairShare
from causeway_server.router.types import Chunk, Request

from ..admission import Priority
from ..tiers.tier import Tier
from ..upstreams.token_meter import TokenMeter

if TYPE_CHECKING:
    from causeway_server.models.parts.graph.branch import Memory

    from ..observability.tracing import Trace
    from .late import DeferredParts

_TIER_HEADER = "x-causeway-tier"
_REASON_HEADER = "x-causeway-tier-reason"
_LOOSENED_HEADER = "x-causeway-loosened"
DEGRADED = ("x-causeway-degraded", "true")


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, with the tier that it named."""

    id: str
    request: Request
    tier: Tier
    deadline: float  # monotonic, s
    priority: Priority = "standard"
    traceparent: str = ""
    trace: Trace | None = None
    tenant: str = ""
    weight: float = 1.0  # of the tenant's share among waiting requests
    tokens: float = 1.0  # estimated cost of a sequence, prompt and answer together
    critical: bool = False  # only the named tier's full answer will do: no fallback, no truncation, no stale answer
    allowed_tiers: frozenset[str] | None = None  # that its caller may use, fallback included; None: all
    memory: Memory | None = None  # of parts, a live session's own; None: the tenant's, or none if it is private
    late: DeferredParts | None = None  # reads the parts of a job whose answer may be revised
    meter: TokenMeter = msgspec.field(default_factory=TokenMeter)  # what it costs upstream


class AnswerHead(msgspec.Struct, frozen=True):
    """The response headers that describe an answer, known with its first chunk and equal for all its clients.

    `keep` False: a fallback answer, for the clients that wait for it now and not for the cache. `stale_s`: the age of a
    stale answer that is used instead of an error.
    """

    headers: tuple[tuple[str, str], ...] = ()
    keep: bool = True
    stale_s: float | None = None

    @property
    def model(self) -> str:
        """Name of the answering tier for clients; "" if the headers have none."""
        return next((value for name, value in self.headers if name == _TIER_HEADER), "")


Piece = AnswerHead | Chunk
"""A piece of an answer: one AnswerHead, followed by Chunks."""
Generate = Callable[[RequestContext], AsyncGenerator[Piece, None]]
"""Type of `Service.answer`. Raises CausewayError; closing the generator stops the work in Triton."""


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
) -> AnswerHead:
    """Build the head of an answer by `tier`; a degraded answer is never kept.

    `loosened`: offered tools whose arguments are not constrained to their schemas.
    """
    headers: tuple[tuple[str, str], ...] = ((_TIER_HEADER, tier), (_REASON_HEADER, reason))
    if loosened:
        headers = (*headers, (_LOOSENED_HEADER, loosened))
    return AnswerHead((*headers, DEGRADED) if degraded else headers, keep and not degraded, stale_s)


FREE_BYTES = 64 * 1024
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
DEFAULT_MAX_REQUESTS = 4096
_RETRY_AFTER_S = 1.0


class BodyMemory:
    """Accounting of requests in progress, and of the bytes of large bodies and of audio in sessions.

    Each is a pool with a share for each caller (`router.trackers`). A body counts until its request ends, since the
    parsed request holds most of it. Bodies of up to FREE_BYTES do not count: the number of connections bounds these,
    and a flood of large bodies does not keep small requests out. A chunked body, whose size is unknown, counts as at
    least FREE_BYTES.

    Args:
        max_requests: Number of connections that may have a request in progress.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        registry: CollectorRegistry | None = None,
        max_requests: int = DEFAULT_MAX_REQUESTS,
    ) -> None:
        self.max_bytes = max_bytes
        self._bytes = FairShare(max_bytes)
        self._requests = FairShare(max_requests)
        if registry is not None:
            gauge = Gauge(
                "causeway_gateway_body_bytes",
                "Request bodies above 64 KiB, and audio clips of sessions, in memory.",
                registry=registry,
            )
            gauge.set_function(lambda: self.held_bytes)

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
                f"Set at least twice server.max_body_bytes ({2 * largest}), because one tenant may have half of it.",
                where="server.max_body_memory_bytes",
            )

    def enter(self, request: object, caller: str) -> None:
        """Count a request in progress until `release`. Raises QueueFull if its caller has used up its share."""
        if not self._requests.hold(id(request), caller):
            raise QueueFull(
                f"Your tenant has {self._requests.held_by(caller)} requests in progress here, its share of "
                f"{self._requests.capacity} connections. Wait until some end.",
                retry_after_s=_RETRY_AFTER_S,
            )

    def hold(self, request: object, caller: str, size: int) -> None:
        """Count `size` bytes for a request, replacing its previous amount, until `release`.

        Raises:
            RateLimited: The bodies of the caller would exceed its share of the memory.
            Shed: All bodies together would exceed the memory.
        """
        pool = self._bytes
        if pool.hold(id(request), caller, size):
            return
        if pool.held_by(caller):
            raise RateLimited(
                f"Your tenant's request bodies and audio have {pool.held_by(caller)} bytes at once, and with {size} "
                f"more they would exceed its share of {self.max_bytes} (server.max_body_memory_bytes). Send fewer "
                "large requests at a time.",
                retry_after_s=_RETRY_AFTER_S,
            )
        raise Shed(
            f"The request bodies in progress have {pool.held} of {self.max_bytes} bytes "
            "(server.max_body_memory_bytes): this one has no room now.",
            retry_after_s=_RETRY_AFTER_S,
        )

    def release(self, request: object) -> None:
        """Stop counting a request that has ended, if it was counted."""
        self._requests.release(id(request))
        if self._bytes.held:
            self._bytes.release(id(request))
