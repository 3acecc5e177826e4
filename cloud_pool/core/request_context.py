"""What goes into the service and what comes out of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import msgspec

from router.types import Chunk, Request

from ..admission import Priority
from ..observability.tracing import Trace
from ..tiers.tier import Tier
from ..upstreams.token_meter import TokenMeter

if TYPE_CHECKING:
    from models.modalities.graph.branch import Memory

    from .late import LateReading

_TIER_HEADER = "x-causeway-tier"
_REASON_HEADER = "x-causeway-tier-reason"
_LOOSENED_HEADER = "x-causeway-loosened"
DEGRADED = ("x-causeway-degraded", "true")


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """One client's request, with the tier that it named."""

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
    late: LateReading | None = None  # reads the parts of a job whose answer may be revised
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
        """The tier that answers, as clients name it; "" if the headers do not."""
        return next((value for name, value in self.headers if name == _TIER_HEADER), "")


Piece = AnswerHead | Chunk
"""An answer is one AnswerHead and then Chunks."""
Generate = Callable[[RequestContext], AsyncGenerator[Piece, None]]
"""`Service.answer`. Raises CausewayError; closing the generator stops the work in Triton."""


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

    `loosened`: offered tools whose arguments are not held to their schemas.
    """
    headers: tuple[tuple[str, str], ...] = ((_TIER_HEADER, tier), (_REASON_HEADER, reason))
    if loosened:
        headers = (*headers, (_LOOSENED_HEADER, loosened))
    return AnswerHead((*headers, DEGRADED) if degraded else headers, keep and not degraded, stale_s)
