"""A client's request: its admission, its context until the one Outcome, and the generation that it may share.

Admission is a rate limit per client, and a bounded queue in front of bounded concurrency. The rate limit applies before
the cache lookup. A permit (concurrency) is needed only for a generation: a cache hit does not queue behind the work
that it saves. A permit is released however its request ends. Waiting clients take turns; the requests of each stay in
order. In a full queue the youngest request of the client with the most waiting requests is displaced by that of another
client, so that a flood delays only its own client. Requests of a higher priority start first, and displace lower ones.

The `RequestContext` passes every piece on to the reply and records numbers and names as they pass, never content. When
the request ends, `finish` turns them into the one Outcome.

A shared generation runs in a task of its own, which belongs to no request: every subscriber, including the one that
started it, reads the pieces as they arrive, and the task is cancelled when the last subscriber leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.abc
import msgspec

from causeway_server.router.decision.decide import RequestMemo, features_of
from causeway_server.router.decision.sessions import SessionTurn, outcome_of
from causeway_server.router.errors import CausewayError, ClientGone, DeadlineExceeded, Draining, QueueFull, RateLimited
from causeway_server.router.jobs.submission import RANK
from causeway_server.router.openai.answer import CachedAnswer
from causeway_server.router.policy.compiled import Limits
from causeway_server.router.policy.signals import concerned
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.reply import (
    AnswerHead,
    AnswerReader,
    Piece,
    ReplayingReply,
    SharedAnswer,
    TextSink,
    text_sink_of,
)
from causeway_server.router.tool_calls.schema import with_own_ids
from causeway_server.router.trackers import MAX_CLIENTS, network_of
from causeway_server.router.types import (
    CacheStatus,
    Chunk,
    DecisionRecord,
    Outcome,
    Request,
    RequestFeatures,
    RoutingHints,
    Usage,
)

from ..backends.backend import JobTerms
from ..clock import Clock
from ..observability.metrics import Metrics
from ..storage.cache import CacheHit
from ..storage.decisions import DecisionStore
from ..storage.spend import SpendStore

if TYPE_CHECKING:
    from ..observability.tracing import RequestTrace

from .budgets import ClientBudgets
from .generation import Generation, policy_label
from .variants import DeviceVariants

log = logging.getLogger(__name__)

Status = Literal["ok", "error", "cancelled", "rejected"]
BUFFER_BYTES = 1 << 20
_NO_USAGE = Usage()
_SMOOTHING = 0.2  # weight of the newest duration in the moving average
_MAX_RETRY_S = 60.0


class Admission:
    """Owns all permits, the queue and the rate-limit buckets. Times are the loop's clock, in seconds. `draining`: new
    requests are refused; `ending`: the daemon, not its client, cancels a request now; `running`, `waiting`: numbers of
    requests with a permit, and without.
    """

    def __init__(self, limits: Limits, budgets: ClientBudgets | None = None) -> None:
        self._limits = limits
        self.budgets = budgets
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by client: tokens, and their time
        # by rank (0 is the highest) and client, in the order of turns
        self._queues: OrderedDict[tuple[int, str], deque[asyncio.Future[None]]] = OrderedDict()
        self.waiting = 0
        self.running = 0
        self._spare: set[anyio.CancelScope] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._average_held_s = 1.0
        self.draining = False
        self.ending = False

    def set_limits(self, limits: Limits) -> None:
        """Apply new limits. Running requests continue; queued ones start if there is room now."""
        self._limits = limits
        self._start_waiting()

    def drain(self) -> None:
        """Refuse new requests; running and queued ones finish."""
        self.draining = True

    def end(self) -> None:
        """Refuse new requests; those in progress are about to be cancelled."""
        self.draining = self.ending = True

    # --- rate --------------------------------------------------------------------------------------------------------

    def admit(self, client: str, now: float) -> None:
        """Charge one request to `client`. Raises Draining; RateLimited, with the time until the next token."""
        if self.draining:
            raise Draining("This server is shutting down.", retry_after_s=1.0)
        self.check_budgets(client, now)
        rate = self._limits.per_client_rps
        if rate is None:
            return
        burst = max(1.0, rate)
        client = network_of(client)
        tokens, at = self.buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + max(0.0, now - at) * rate)
        if len(self.buckets) >= MAX_CLIENTS:
            self.buckets.popitem(last=False)
        self.buckets[client] = (tokens - 1.0 if tokens >= 1.0 else tokens, now)
        if tokens < 1.0:
            wait_s = (1.0 - tokens) / rate if rate > 0.0 else _MAX_RETRY_S
            raise RateLimited(f"The rate limit is {rate:g} requests per second.", retry_after_s=wait_s)

    def check_budgets(self, client: str, now: float) -> None:
        """Check a client's budgets alone, as for a job that was admitted earlier. Raises RateLimited."""
        if self.budgets is not None:
            self.budgets.check(client, now)

    # --- permits -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def permit(self, deadline: float, client: str = "", rank: int = 1) -> AsyncIterator[None]:
        """Hold one permit, the right to run one generation, in the block; wait for it until `deadline`.

        `rank_of` gives the rank. Raises QueueFull, with the time to retry, also if another client's request displaced
        this one; DeadlineExceeded.
        """
        await self.acquire(deadline, client, rank)
        started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.release(asyncio.get_running_loop().time() - started)

    def try_acquire(self) -> bool:
        """Take a permit, without a context, and return True, if there is one now."""
        for scope in self._spare:
            scope.cancel()
        if self.running >= self._limits.concurrent or self.waiting:
            return False
        self.running += 1
        return True

    async def acquire(self, deadline: float, client: str, rank: int = 1) -> None:
        """Take a permit, without a context. Raises as `permit`."""
        if self.try_acquire():
            return
        turns = rank, network_of(client)
        if self.waiting >= self._limits.queue and not self._displace_for(turns):
            raise self._full()
        await self._wait(deadline, turns)

    def release(self, held_s: float) -> None:
        """Give back a permit that was held for `held_s` seconds."""
        self._average_held_s += _SMOOTHING * (held_s - self._average_held_s)
        self._release()

    async def _wait(self, deadline: float, turns: tuple[int, str]) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(deadline, _expire, turn)
        self._queues.setdefault(turns, deque()).append(turn)
        self.waiting += 1
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release()  # granted in the same step as the cancellation
            elif turn in self._queues.get(turns, ()):
                self._queues[turns].remove(turn)
                self._forget_turn(turns)
            raise
        finally:
            timer.cancel()

    def _displace_for(self, turns: tuple[int, str]) -> bool:
        """Displace the youngest request of the client with most waiting ones of the lowest priority, if that is lower,
        or if it is the same and that client has more than this one.
        """
        if not self._queues:
            return False
        most = max(self._queues, key=lambda other: (other[0], len(self._queues[other])))
        if most[0] < turns[0] or (
            most[0] == turns[0] and len(self._queues[most]) <= len(self._queues.get(turns, ())) + 1
        ):
            return False
        turn = self._queues[most].pop()
        self._forget_turn(most)
        if not turn.done():
            turn.set_exception(self._full())
        return True

    def _forget_turn(self, turns: tuple[int, str]) -> None:
        self.waiting -= 1
        if not self._queues[turns]:
            del self._queues[turns]

    def _full(self) -> QueueFull:
        """Return the error of a full queue, which advances one request every (mean duration / concurrency) seconds."""
        wait_s = min(_MAX_RETRY_S, max(1.0, self._average_held_s / max(1, self._limits.concurrent)))
        return QueueFull(
            f"The queue is full: {self.running} requests are running and {self.waiting} are queued.",
            retry_after_s=wait_s,
        )

    # --- work in idle time -----------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Return whether a request could start now."""
        return self.running < self._limits.concurrent and not self.waiting

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)

    async def idle(self) -> None:
        """Wait until no request runs or waits."""
        while not self.is_idle:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(turn)
            await turn

    @contextmanager
    def spare(self) -> Iterator[None]:
        """Run work that needs no permit in the block, and cancel it as soon as a request wants a permit."""
        with anyio.CancelScope() as scope:
            self._spare.add(scope)
            try:
                yield
            finally:
                self._spare.discard(scope)

    def _release(self) -> None:
        self.running -= 1
        if self.waiting:
            self._start_waiting()
        if self._idle and not self.running:
            turns, self._idle = self._idle, []
            for turn in turns:
                if not turn.done():
                    turn.set_result(None)

    def _start_waiting(self) -> None:
        while self.waiting and self.running < self._limits.concurrent:
            turns = min(self._queues, key=itemgetter(0))
            turn = self._queues[turns].popleft()
            self._queues.move_to_end(turns)
            self._forget_turn(turns)
            if not turn.done():
                self.running += 1
                turn.set_result(None)


def rank_of(hints: RoutingHints) -> int:
    """Return the rank of a request in the queue, 0 for the highest priority."""
    return RANK["bulk" if "bulk" in hints.tags else hints.priority or "standard"]


def _expire(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(DeadlineExceeded("The deadline passed while the request was queued."))


# --- one client's request ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Destinations of requests' outcomes, and the clock that dates them."""

    decisions: DecisionStore
    spend: SpendStore
    metrics: Metrics
    clock: Clock
    variants: DeviceVariants


@dataclass(eq=False, repr=False)
class RequestContext:
    """A request from its arrival to its outcome. The HTTP API creates it; `generation` is set by the service."""

    request: Request
    reply: ReplayingReply
    _: KW_ONLY
    id: str  # the decision's id, also the `x-request-id`
    arrived: float  # time of arrival, monotonic seconds
    traceparent: str = ""  # W3C trace context of the client; "" for none
    trace: RequestTrace | None = None  # the spans of this request; None when tracing is off
    memo: RequestMemo = field(default_factory=RequestMemo)  # values derived from an equal request
    job: JobTerms | None = None  # set if the request is a job, which may wait and is not answered by a lesser target
    generation: Generation = field(init=False)  # this request's own, until the request joins a shared one
    deadline: float = field(init=False)  # set with the generation
    head: AnswerHead | None = None
    error: CausewayError | None = None
    shared: bool = False  # whether another request's generation answers
    session: SessionTurn | None = None  # None: the policy has no `session`
    _usage: Usage = _NO_USAGE
    _finish_reason: str = ""
    _hit: CacheHit | None = None  # the replayed cache hit

    @property
    def committed(self) -> bool:
        return self.head is not None

    @property
    def usage(self) -> Usage:
        """The usage of the answer so far."""
        return self._usage

    @property
    def features(self) -> RequestFeatures:
        """The features of the request, which equal requests share."""
        memo = self.memo
        if memo.features is None:
            memo.features = features_of(self.request)
        return memo.features

    @property
    def cache(self) -> CacheStatus:
        if self.head is not None:
            return self.head.cache
        if self.shared:
            return "coalesced"
        return "bypass" if self.generation.cache_key is None else "miss"

    def follow(self, generation: Generation, *, shared: bool = False) -> None:
        """Take the answer from `generation`. `shared`: whether another request started it."""
        self.generation = generation
        self.shared = shared

    def resume(self, head: AnswerHead, finish_reason: str, usage: Usage) -> None:
        """Take over an answer that was begun in callbacks."""
        self.head, self._finish_reason, self._usage = head, finish_reason, usage

    # --- Reply -------------------------------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        own_head = head.id == self.id and head.cache == self.cache
        self.head = head if own_head else msgspec.structs.replace(head, id=self.id, cache=self.cache)
        if self.session is not None:
            self.head = self._with_session(self.session, self.head)
        await self.reply.commit(self.head)

    def _with_session(self, turn: SessionTurn, head: AnswerHead) -> AnswerHead:
        """Note the target that answers, and return the head with the session's header."""
        target, is_cached = self.generation.target, head.route == "cache"
        model = head.model if is_cached or target is None else target.served
        decision = None if is_cached else self.generation.decision
        turn.outcome = outcome_of(turn.session, decision, head.target, model, head.reason)
        return msgspec.structs.replace(head, session=turn.outcome.header)

    def send(self, piece: Piece) -> Awaitable[None] | None:
        if piece.usage is not None:
            self._usage = piece.usage
        if isinstance(piece, Chunk) and piece.finish_reason is not None and not self._finish_reason:
            self._finish_reason = piece.finish_reason
        if self.shared and isinstance(piece, Chunk):
            piece = with_own_ids(piece, self.id)
        if self.session is not None and isinstance(piece, Chunk):
            self.session.add(piece)
        return self.reply.send(piece)

    def text_sink(self, index: int) -> TextSink | None:
        return text_sink_of(self.reply, index)

    async def replay(
        self, hit: CacheHit, *, stale: CausewayError | None = None, check: CausewayError | None = None
    ) -> None:
        """Answer from the cache. `stale`: the error because of which the answer is an expired one; `check`: the error
        because of which no new one was made, although it was due.
        """
        answer, self._hit = hit.answer, hit
        fresh: CacheStatus = "hit" if hit.similarity is None else "semantic"
        reason = "cache"
        for kind, error in (("stale", stale), ("check", check)):
            reason = reason if error is None else f"{kind}: {error.code}"
        target = next((one for one in self.generation.policy.targets if one.name == answer.target), None)
        self.head = AnswerHead(
            id=self.id,
            policy=policy_label(self.generation.policy),
            route="cache",
            target=answer.target,
            model=answer.model,
            reason=reason,
            cache=fresh if stale is None else "stale",
            degraded=stale is not None,
            variant="" if target is None else target.variant,
            temperature=None if target is None else target.temperature,
        )
        body = answer.body
        self._usage = body.usage
        if isinstance(body, CachedAnswer):
            self._finish_reason = body.choices[0].finish_reason or ""
            body = body.with_own_ids(self.id) if body.has_calls else body
        if self.session is not None:
            self.head = self._with_session(self.session, self.head)
            for chunk in body.chunks if isinstance(body, CachedAnswer) else ():
                self.session.add(chunk)
        await self.reply.replay(self.head, body)

    # --- outcome -----------------------------------------------------------------------------------------------------

    def finish(self, now: float, unix_s: float) -> DecisionRecord:
        """Return the record of this request with its one Outcome. `now`: its end, monotonic seconds."""
        generation, features = self.generation, self.features
        return DecisionRecord(
            id=self.id,
            created=unix_s,
            request=features,
            estimates=generation.estimates,
            unrecorded=concerned(generation.unrecorded, features.modalities),
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
            variant="" if head is None else head.variant,
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
            session=None if self.session is None else self.session.outcome,
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
        """Return the time from arrival to the first token; for a cached answer, which arrives at once, to its end."""
        if self.head is None:
            return None
        if self.head.route == "cache" or self.generation.sequence is None:
            return total_ms
        last = self.generation.records(self.arrived)[-1]
        if last.ttft_ms is None:
            return None
        earlier_ms = (self.generation.arrived - self.arrived) * 1000.0  # < 0: the generation was already running
        return max(0.0, earlier_ms + last.started_ms + last.ttft_ms)


# --- single-flight ---------------------------------------------------------------------------------------------------


class Subscriber(AnswerReader):
    """A reader's position in a shared generation."""

    def __init__(self, shared: SharedGeneration) -> None:
        super().__init__(joined=shared.was_joined)
        self.shared = shared


class SharedGeneration(SharedAnswer[Piece, Subscriber]):
    """A generation with its buffered answer: the `Reply` of the attempts, and the source of all subscribers."""

    def __init__(self, generation: Generation, buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__(buffer_bytes)
        self.generation = generation
        self.head: AnswerHead | None = None
        self.scope = anyio.CancelScope()

    @property
    def joinable(self) -> bool:
        return self.whole and not self.finished and not self.abandoned

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    def join(self) -> Subscriber:
        return self.add(Subscriber(self))

    def leave(self, subscriber: Subscriber) -> None:
        super().leave(subscriber)
        if not self.subscribers:
            self.abandoned = True
            self.scope.cancel()


Produce = Callable[[SharedGeneration], Awaitable[None]]


class SharedGenerations:
    """The shared generations in progress, by key."""

    def __init__(self) -> None:
        self._tasks: anyio.abc.TaskGroup | None = None
        self._by_key: dict[bytes, SharedGeneration] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def subscribers(self) -> int:
        """Number of subscribers of all generations together."""
        return sum(len(shared.subscribers) for shared in self._by_key.values())

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Run generations as children of `tasks`."""
        self._tasks = tasks

    @contextmanager
    def join(self, key: bytes, generation: Generation, produce: Produce) -> Iterator[tuple[Subscriber, bool]]:
        """Subscribe to the generation of `key`; start it with `produce` unless one can be joined. Yields the
        subscriber, and whether it started it. Every subscriber gets an error of `produce`; when the last one leaves, it
        is cancelled.
        """
        if self._tasks is None:
            raise Draining("This server has not started.")
        shared = self._by_key.get(key)
        started = shared is None or not shared.joinable
        if shared is None or started:
            shared = self._by_key[key] = SharedGeneration(generation)
            self._tasks.start_soon(self._run, key, shared, produce)
        subscriber = shared.join()
        try:
            yield subscriber, started
        finally:
            shared.leave(subscriber)

    async def _run(self, key: bytes, shared: SharedGeneration, produce: Produce) -> None:
        error: CausewayError | None = None
        ended = False
        try:
            with shared.scope:
                try:
                    await produce(shared)
                except CausewayError as failure:
                    error = failure
                except Exception as failure:
                    log.error("A generation failed unexpectedly: %s", redacted(failure))
                    error = CausewayError("Internal error.")
                ended = True
        finally:
            if self._by_key.get(key) is shared:
                del self._by_key[key]
            shared.finish(error if ended else Draining("This server stopped while the answer was being generated."))
