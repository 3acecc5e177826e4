"""What goes into the service, and what comes out of it."""

from __future__ import annotations

import msgspec

from router.types import Chunk, Request

from ..admission import Priority
from ..config.tiers import Tier
from ..observability.tracing import Trace

TIER = "x-causeway-tier"
WHY = "x-causeway-tier-reason"
DEGRADED = "x-causeway-degraded"


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """One caller's ask for one tier."""

    id: str
    request: Request
    tier: Tier
    deadline: float  # monotonic, s
    priority: Priority = "standard"
    traceparent: str = ""
    trace: Trace | None = None
    tenant: str = ""
    weight: float = 1.0  # of the tenant's share where many wait
    tokens: float = 1.0  # what it may cost, prompt and answer together
    stays: bool = False  # this tier's whole answer or none: the request is critical, or can wait for it


class AnswerHead(msgspec.Struct, frozen=True):
    """What is known once the first piece is: response headers about the answer, the same for everyone who gets it.

    `keep` False: an answer of second choice, for those who wait for it and not for later ones. `stale_s`: the age of an
    old answer that stands in for a refusal.
    """

    headers: tuple[tuple[str, str], ...] = ()
    keep: bool = True
    stale_s: float | None = None

    @property
    def tier(self) -> str:
        """Who answered; "" where nobody said."""
        return next((value for name, value in self.headers if name == TIER), "")


Piece = AnswerHead | Chunk
"""An answer is a Head and then Chunks."""


def answer_head(
    tier: str, why: str, *, degraded: bool = False, keep: bool = True, stale_s: float | None = None
) -> AnswerHead:
    headers = ((TIER, tier), (WHY, why))
    return AnswerHead((*headers, (DEGRADED, "true")) if degraded else headers, keep and not degraded, stale_s)
