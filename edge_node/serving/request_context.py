"""Chunks → Outcome: what is known of one request while it is answered, and what remains of it afterwards, exactly once.

A story stands between the service and the client's reply: whatever passes is noted and handed on. It keeps numbers and
names, never content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from router.decision.cache_key import CachePlanMemo
from router.errors import CausewayError, ClientGone, Draining
from router.openai import CachedAnswer
from router.types import CacheStatus, Chunk, DecisionRecord, Outcome, Request, Usage

from ..storage.cache import StoredAnswer
from .generation import Generation, policy_label
from .reply import AnswerHead, Piece, Reply

if TYPE_CHECKING:
    from ..observability.tracing import RequestTrace

Status = Literal["ok", "error", "cancelled", "rejected"]


class Arrival(msgspec.Struct, frozen=True):
    """How a request came: its decision's id, when (monotonic s), and the trace that it belongs to."""

    id: str
    arrived: float
    traceparent: str = ""
    trace: RequestTrace | None = None
    memo: CachePlanMemo = msgspec.field(default_factory=CachePlanMemo)  # of the request


class RequestContext:
    """`work` is this request's own until it joins a flight, then the flight's."""

    def __init__(self, work: Generation, reply: Reply) -> None:
        self.work = work
        self.id = work.id
        self.arrived = work.arrived
        self.deadline = work.deadline
        self.request: Request = work.request
        self.trace = work.trace
        self.head: AnswerHead | None = None
        self.error: CausewayError | None = None
        self.shared = False  # another request's work answered
        self._reply = reply
        self._usage = Usage()
        self._finish_reason = ""

    @property
    def committed(self) -> bool:
        return self.head is not None

    @property
    def cache(self) -> CacheStatus:
        if self.head is not None:
            return self.head.cache
        if self.shared:
            return "coalesced"
        return "bypass" if self.work.key is None else "miss"

    def follow(self, work: Generation, *, shared: bool) -> None:
        """From here on this is the story of that work, too."""
        self.work = work
        self.shared = shared

    # --- what passes (Reply) -----------------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        own = head.id == self.id and head.cache == self.cache
        self.head = head if own else msgspec.structs.replace(head, id=self.id, cache=self.cache)
        await self._reply.commit(self.head)

    async def send(self, piece: Piece) -> None:
        if piece.usage is not None:
            self._usage = piece.usage
        if isinstance(piece, Chunk) and piece.finish_reason is not None and not self._finish_reason:
            self._finish_reason = piece.finish_reason
        await self._reply.send(piece)

    async def replay(self, answer: StoredAnswer, *, stale: CausewayError | None = None) -> None:
        """An answer from the cache. `stale`: what went wrong, so that an old one has to do."""
        self.head = AnswerHead(
            id=self.id,
            policy=policy_label(self.work.policy),
            route="cache",
            target=answer.target,
            model=answer.model,
            reason="cache" if stale is None else f"stale: {stale.code}",
            cache="hit" if stale is None else "stale",
            degraded=stale is not None,
        )
        body = answer.body
        self._usage = body.usage
        if isinstance(body, CachedAnswer):
            self._finish_reason = body.choices[0].finish_reason or ""
        await self._reply.replay(self.head, body)

    # --- what remains ------------------------------------------------------------------------------------------------

    def outcome(self, now: float) -> Outcome:
        head, error = self.head, self.error
        total_ms = (now - self.arrived) * 1000.0
        return Outcome(
            status=self._status(),
            http_status=200 if head is not None and error is None else self._http_status(),
            route="none" if head is None else head.route,
            target="" if head is None else head.target,
            model="" if head is None else head.model,
            reason=self.work.reason if head is None else head.reason,
            cache=self.cache,
            degraded=head is not None and head.degraded,
            attempts=self.work.records(now),
            ttft_ms=self._ttft_ms(total_ms),
            total_ms=total_ms,
            usage=self._usage,
            finish_reason=self._finish_reason if error is None else "",
            usd=0.0 if self.shared else self.work.usd(),
            error="" if error is None else error.code,
        )

    def record(self, outcome: Outcome, created: float) -> DecisionRecord:
        work, hints = self.work, self.request.hints
        return DecisionRecord(
            id=self.id,
            created=created,
            kind=self.request.kind,
            model=self.request.model,
            stream=self.request.stream,
            client=hints.client,
            tags=hints.tags,
            prefer=hints.prefer,
            estimates=work.estimates,
            snapshot=work.snapshot,
            decision=work.decision,
            outcome=outcome,
        )

    def _status(self) -> Status:
        if self.error is None:
            return "ok"
        if isinstance(self.error, ClientGone):
            return "cancelled"
        tried = self.work.course is not None and self.work.course.attempts
        refused = self.error.status < 500 or isinstance(self.error, Draining)
        return "rejected" if refused and not tried else "error"

    def _http_status(self) -> int:
        assert self.error is not None
        return 200 if self.head is not None and self.request.stream else self.error.status

    def _ttft_ms(self, total_ms: float) -> float | None:
        """From arrival to the first token that was made; an answer from the cache is there all at once."""
        if self.head is None:
            return None
        if self.head.route == "cache" or self.work.course is None:
            return total_ms
        last = self.work.records(self.arrived)[-1]
        if last.ttft_ms is None:
            return None
        earlier_ms = (self.work.arrived - self.arrived) * 1000.0  # < 0: the work was under way already
        return max(0.0, earlier_ms + last.started_ms + last.ttft_ms)
