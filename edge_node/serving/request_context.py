"""One client's request from arrival to outcome: id, times, reply, and the generation that answers it.

The context passes every piece on to the reply and notes numbers and names as they pass, never content. When the request
ends, `finish` turns them into the one Outcome.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from router.decision.decide import RequestMemo, features_of
from router.errors import CausewayError, ClientGone, Draining
from router.openai import CachedAnswer
from router.policy.signals import concerned
from router.serving.reply import AnswerHead, Piece, ReplayingReply
from router.tool_calls.ids import with_own_ids
from router.types import CacheStatus, Chunk, DecisionRecord, Outcome, Request, Usage

from ..backends.backend import JobTerms
from ..clock import Clock
from ..observability.metrics import Metrics
from ..storage.cache import CacheHit
from ..storage.decisions import DecisionStore
from ..storage.spend import SpendStore
from .generation import Generation, policy_label

if TYPE_CHECKING:
    from ..observability.tracing import RequestTrace

Status = Literal["ok", "error", "cancelled", "rejected"]


_NO_USAGE = Usage()


@dataclass(frozen=True)
class Records:
    """Where the outcomes of requests go, and the clock that dates them."""

    decisions: DecisionStore
    spend: SpendStore
    metrics: Metrics
    clock: Clock


class RequestContext:
    """Created by the HTTP API for each request; `generation` is set by the service.

    Args:
        request: the parsed request.
        reply: the response to the client.
        id: of the decision, also the `x-request-id`.
        arrived: monotonic seconds.
        traceparent: W3C trace context of the client, "" for none.
        trace: the spans of this request, None when tracing is off.
        memo: what was derived from an equal request.
        job: set if the request is a job, which may wait and is not answered by a lesser target.
    """

    generation: Generation  # this request's own, until the request joins a shared one

    def __init__(
        self,
        request: Request,
        reply: ReplayingReply,
        *,
        id: str,  # noqa: A002
        arrived: float,
        traceparent: str = "",
        trace: RequestTrace | None = None,
        memo: RequestMemo | None = None,
        job: JobTerms | None = None,
    ) -> None:
        self.request = request
        self.job = job
        self.reply = reply
        self.id = id
        self.arrived = arrived
        self.traceparent = traceparent
        self.trace = trace
        self.memo = memo or RequestMemo()
        self.deadline = arrived
        self.head: AnswerHead | None = None
        self.error: CausewayError | None = None
        self.shared = False  # another request's generation answers
        self._usage = _NO_USAGE
        self._finish_reason = ""
        self._hit: CacheHit | None = None  # what was replayed

    @property
    def committed(self) -> bool:
        return self.head is not None

    @property
    def cache(self) -> CacheStatus:
        if self.head is not None:
            return self.head.cache
        if self.shared:
            return "coalesced"
        return "bypass" if self.generation.cache_key is None else "miss"

    def follow(self, generation: Generation, *, shared: bool = False) -> None:
        """Take the answer from `generation`. `shared`: another request started it."""
        self.generation = generation
        self.shared = shared

    # --- Reply -------------------------------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        own_head = head.id == self.id and head.cache == self.cache
        self.head = head if own_head else msgspec.structs.replace(head, id=self.id, cache=self.cache)
        await self.reply.commit(self.head)

    def send(self, piece: Piece) -> Awaitable[None] | None:
        if piece.usage is not None:
            self._usage = piece.usage
        if isinstance(piece, Chunk) and piece.finish_reason is not None and not self._finish_reason:
            self._finish_reason = piece.finish_reason
        if self.shared and isinstance(piece, Chunk):
            piece = with_own_ids(piece, self.id)
        return self.reply.send(piece)

    async def replay(
        self, hit: CacheHit, *, stale: CausewayError | None = None, check: CausewayError | None = None
    ) -> None:
        """Answer from the cache.

        Args:
            stale: the error because of which an expired answer is served.
            check: the error because of which an answer is served that should have been made anew.
        """
        answer, self._hit = hit.answer, hit
        fresh: CacheStatus = "hit" if hit.similarity is None else "semantic"
        reason = "cache"
        for kind, error in (("stale", stale), ("check", check)):
            reason = reason if error is None else f"{kind}: {error.code}"
        self.head = AnswerHead(
            id=self.id,
            policy=policy_label(self.generation.policy),
            route="cache",
            target=answer.target,
            model=answer.model,
            reason=reason,
            cache=fresh if stale is None else "stale",
            degraded=stale is not None,
        )
        body = answer.body
        self._usage = body.usage
        if isinstance(body, CachedAnswer):
            self._finish_reason = body.choices[0].finish_reason or ""
            body = body.with_own_ids(self.id)
        await self.reply.replay(self.head, body)

    # --- outcome -----------------------------------------------------------------------------------------------------

    def finish(self, now: float, unix_s: float) -> DecisionRecord:
        """The record of this request with its one Outcome. `now`: when it ended, monotonic seconds."""
        generation, memo = self.generation, self.memo
        if memo.features is None:
            memo.features = features_of(self.request)
        return DecisionRecord(
            id=self.id,
            created=unix_s,
            request=memo.features,
            estimates=generation.estimates,
            unrecorded=concerned(generation.unrecorded, memo.features.modalities),
            snapshot=generation.snapshot,
            decision=generation.decision,
            outcome=self._outcome(now),
            parts=generation.parts,
            shadow="" if self.shared else generation.shadow,
        )

    def _outcome(self, now: float) -> Outcome:
        head, error = self.head, self.error
        total_ms = (now - self.arrived) * 1000.0
        return Outcome(
            status=self._status(),
            http_status=200 if head is not None and error is None else self._http_status(),
            route="none" if head is None else head.route,
            target="" if head is None else head.target,
            model="" if head is None else head.model,
            reason=self.generation.reason if head is None else head.reason,
            cache=self.cache,
            cache_reason=self.generation.cache_plan.bypass if self.cache == "bypass" else "",
            cache_age_s=None if self._hit is None else self._hit.age_s,
            similarity=None if self._hit is None else self._hit.similarity,
            degraded=head is not None and head.degraded,
            attempts=self.generation.records(now),
            ttft_ms=self._ttft_ms(total_ms),
            total_ms=total_ms,
            usage=self._usage,
            finish_reason=self._finish_reason if error is None else "",
            usd=0.0 if self.shared else self.generation.usd(),
            estimated=not self.shared and self.generation.estimated,
            error="" if error is None else error.code,
        )

    def _status(self) -> Status:
        if self.error is None:
            return "ok"
        if isinstance(self.error, ClientGone):
            return "cancelled"
        attempted = self.generation.sequence is not None and self.generation.sequence.attempts
        refused = self.error.status < 500 or isinstance(self.error, Draining)
        return "rejected" if refused and not attempted else "error"

    def _http_status(self) -> int:
        assert self.error is not None
        return 200 if self.head is not None and self.request.stream else self.error.status

    def _ttft_ms(self, total_ms: float) -> float | None:
        """From arrival to the first token; for a cached answer, which arrives all at once, to its end."""
        if self.head is None:
            return None
        if self.head.route == "cache" or self.generation.sequence is None:
            return total_ms
        last = self.generation.records(self.arrived)[-1]
        if last.ttft_ms is None:
            return None
        earlier_ms = (self.generation.arrived - self.arrived) * 1000.0  # < 0: the generation was already running
        return max(0.0, earlier_ms + last.started_ms + last.ttft_ms)
