"""One request, hop by hop, always forward. Read this first: it is the table of hops.

    bytes → Request      `server`, `intake`: parsed and validated once, before we come in
    admission            `admission`: a rate per client; a bounded number at work, a bounded queue
    cache                `cache`, `flight`: the policy's rule; an exact answer, or one that is being made right now
    Request → Decision   `router.decision.decide`: pure
    Decision → Chunks    `attempts`: until one target answers; after the first byte there is no other
    Chunks → Outcome     `story`: exactly one, whatever happens: metrics, decision record, cache write

An answer from the cache takes no slot: it does not wait behind the work that it saves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from router.decision.attempts import AttemptSequence
from router.decision.cache_key import CachePlanMemo, CachePlanner, is_cacheable
from router.decision.decide import decide
from router.errors import AllAttemptsFailed, BackendError, CausewayError, ClientGone, DeadlineExceeded, QueueFull
from router.openai import CachedAnswer
from router.policy.compiled import Policy
from router.types import AUTO, CachePlan, Chunk, Decision, Embeddings, Estimates, Message, Request, Snapshot

from ..clock import Clock
from ..observability.metrics import FinishedGeneration, Metrics
from ..signals.collector import SignalCollector
from ..signals.estimators import QUALITY
from ..storage.cache import AnswerCache, CacheHit, StoredAnswer
from ..storage.decisions import DecisionStore
from ..storage.policies import PolicyStore
from .admission import Admission
from .attempts import AttemptRunner, where
from .generation import Generation
from .reply import Piece, Reply, Sink
from .request_context import Arrival, RequestContext
from .shared_generation import SharedGeneration, SharedGenerations, Subscriber

log = logging.getLogger(__name__)

TokenCounter = Callable[[Request], Awaitable[int | None]]
QualityEstimator = Callable[[Policy, Request], float | None]
_COUNT_S = 1.0  # the engine's time to count a prompt's tokens: past it the signal is absent
_TOKENS = "request.prompt_tokens"
_ESTIMATED = frozenset((_TOKENS, QUALITY))
_SELF_CHECK_REQUEST = Request(
    kind="chat", model=AUTO, messages=(Message(role="user", content="Are you there?"),), max_tokens=1
)


class Explanation(msgspec.Struct, frozen=True):
    """What would happen to a request now. `cached_age_s` None: the cache has no answer."""

    cache: CachePlan
    cached_age_s: float | None
    decision: Decision
    estimates: Estimates
    snapshot: Snapshot


class Service:
    """`count` asks the edge model for a prompt's length, `judge` tells `edge.quality`; `scope` is what else tells
    answers of one policy apart.
    """

    def __init__(
        self,
        *,
        policies: PolicyStore,
        admission: Admission,
        cache: AnswerCache,
        flights: SharedGenerations,
        attempts: AttemptRunner,
        signals: SignalCollector,
        decisions: DecisionStore,
        metrics: Metrics,
        clock: Clock,
        count: TokenCounter | None = None,
        judge: QualityEstimator | None = None,
        scope: bytes = b"",
        deadline_s: float = 120.0,
    ) -> None:
        self._policies = policies
        self._admission = admission
        self._cache = cache
        self._flights = flights
        self._attempts = attempts
        self._signals = signals
        self._decisions = decisions
        self._metrics = metrics
        self._clock = clock
        self._count = count
        self._judge = judge
        self._plans = CachePlanner(scope)
        self._deadline_s = deadline_s

    async def answer(self, request: Request, reply: Reply, ask: Arrival) -> None:
        """Returns when the last byte is on its way. Raises CausewayError, or CancelledError when the caller leaves."""
        story = RequestContext(self._begin(request, ask), reply)
        try:
            await self._hops(story, ask.memo)
            await reply.end()
        except CausewayError as error:
            story.error = error
            raise
        except asyncio.CancelledError:
            story.error = ClientGone("the caller left")
            raise
        except Exception as failure:
            log.error("a request failed unexpectedly: %s", where(failure))
            story.error = CausewayError("internal error")
            raise story.error from failure
        finally:
            # In the loop's next turn: what was written leaves first, and before anything else can ask for the record.
            asyncio.get_running_loop().call_soon(self._settle, story, self._clock.monotonic())

    async def explain(self, request: Request) -> Explanation:
        """What would happen, without doing it."""
        work = self._begin(request, Arrival(id="", arrived=self._clock.monotonic()))
        self._admission.admit(request.hints.client, work.arrived)
        found = await self._find(work, CachePlanMemo())
        work.plan = self._plans.plan(work.policy, request, work.snapshot, work.estimates).plan
        work.snapshot = self._signals.snapshot(work.policy)
        await self._decide(work)
        assert work.decision is not None
        return Explanation(
            cache=work.plan,
            cached_age_s=None if found is None else found.age_s,
            decision=work.decision,
            estimates=work.estimates,
            snapshot=work.snapshot,
        )

    def self_check(self) -> Decision:
        """Route something, for whoever wants to know whether we still can: nothing is run, counted or recorded."""
        policy = self._policies.active
        snapshot = self._signals.snapshot(policy)
        self._plans.plan(policy, _SELF_CHECK_REQUEST, snapshot, Estimates())
        return decide(policy, _SELF_CHECK_REQUEST, snapshot, Estimates())

    def _begin(self, request: Request, ask: Arrival) -> Generation:
        policy = self._policies.active
        left_s = self._deadline_s
        if request.hints.deadline_ms is not None:
            left_s = min(left_s, request.hints.deadline_ms / 1000.0)
        return Generation(
            ask.id,
            request,
            policy,
            self._signals.recent_snapshot(policy),
            arrived=ask.arrived,
            deadline=ask.arrived + left_s,
            traceparent=ask.traceparent,
            trace=ask.trace,
        )

    # --- the hops ----------------------------------------------------------------------------------------------------

    async def _hops(self, story: RequestContext, memo: CachePlanMemo) -> None:
        self._admission.admit(story.request.hints.client, story.arrived)
        found = await self._find(story.work, memo)
        if found is not None and _is_fresh(found, story.work.plan):
            await story.replay(found.answer)
            return
        try:
            if story.work.key is None:
                await self._do(story.work, story)
            else:
                await self._share(story, story.work.key)
        except CausewayError as error:
            if found is None or story.committed or not _may_be_stale(found, story.work.plan, error):
                raise
            await story.replay(found.answer, stale=error)

    async def _find(self, work: Generation, memo: CachePlanMemo) -> CacheHit | None:
        """Cache: the policy's rule for this request, and what is known under its key, however old."""
        policy, request = work.policy, work.request
        if not is_cacheable(policy, request):
            return None
        if not _ESTIMATED.isdisjoint(policy.cache_needs.signals):
            await self._estimate(work, policy.cache_needs.signals)
            planned = self._plans.plan(policy, request, work.snapshot, work.estimates)
        else:
            planned = self._plans.plan_memoized(policy, request, work.snapshot, memo)
        work.plan, work.key = planned.plan, planned.key
        if work.key is None:
            return None
        found = self._cache.lookup_memory(work.key)
        if found is None and not work.on_device:
            found = await self._cache.lookup_disk(work.key, work.request)
        return found

    async def _share(self, story: RequestContext, key: bytes) -> None:
        """One answer for all who ask the same at the same time."""
        flight_key = key + (b"stream" if story.request.stream else b"whole")
        while True:
            own = story.work
            with self._flights.join(flight_key, own, self._do_and_keep) as (listener, started):
                story.follow(listener.flight.work, shared=not started)
                try:
                    await _listen(listener, story)
                    return
                except DeadlineExceeded:
                    # The one who started it may have had less time than this caller, who then starts afresh.
                    if started or story.committed or self._clock.monotonic() >= story.deadline:
                        raise
            story.follow(own, shared=False)

    async def _do_and_keep(self, flight: SharedGeneration) -> None:
        await self._do(flight.work, flight)
        if flight.whole:
            self._keep(flight.work, flight.pieces)

    async def _do(self, work: Generation, sink: Sink) -> None:
        """Work that a target does: a slot, the decision, the attempts."""
        async with self._admission.slot(work.deadline):
            work.snapshot = self._signals.snapshot(work.policy)
            await self._decide(work)
            try:
                await self._attempts.run(work, sink)
            finally:
                work.over = True
                asyncio.get_running_loop().call_soon(self._account, work, self._clock.monotonic())

    async def _decide(self, work: Generation) -> None:
        needs = work.policy.route_needs if work.request.model == AUTO else work.policy.constraint_needs
        if not _ESTIMATED.isdisjoint(needs.signals):
            await self._estimate(work, needs.signals)
        work.decision = decide(work.policy, work.request, work.snapshot, work.estimates)
        choices = work.request.n * max(1, len(work.request.prompts))
        work.course = AttemptSequence(work.decision, stream=work.request.stream, choices=choices, arrived=work.arrived)

    async def _estimate(self, work: Generation, signals: frozenset[str]) -> None:
        """What is known of the request alone and costs something. What cannot be told stays absent."""
        if QUALITY in signals and self._judge is not None and work.estimates.quality is None:
            try:
                quality = self._judge(work.policy, work.request)
                work.estimates = msgspec.structs.replace(work.estimates, quality=quality)
            except Exception as failure:
                log.warning("the device's quality could not be estimated: %s", where(failure))
        if _TOKENS not in signals or self._count is None or work.estimates.prompt_tokens is not None:
            return
        try:
            async with asyncio.timeout_at(min(work.deadline, self._clock.monotonic() + _COUNT_S)):
                tokens = await self._count(work.request)
                work.estimates = msgspec.structs.replace(work.estimates, prompt_tokens=tokens)
        except Exception as failure:
            log.warning("the prompt's tokens could not be counted: %s", where(failure))

    # --- what remains ------------------------------------------------------------------------------------------------

    def _account(self, work: Generation, ended: float) -> None:
        """Once per work, however many listened."""
        usd = work.usd()
        self._signals.add_cost(usd)
        self._metrics.generation_finished(
            FinishedGeneration(
                kind=work.request.kind,
                requested=work.request.model,
                attempts=work.records(ended),
                target=work.target if work.committed else None,
                usage=work.usage,
                usd=usd,
                degraded=work.degraded,
            )
        )

    def _keep(self, work: Generation, pieces: tuple[Piece, ...]) -> None:
        """A later hit has to say what the policy's first choice said: an answer of second choice is not kept."""
        target, decision = work.target, work.decision
        assert target is not None
        assert decision is not None
        assert work.key is not None
        if work.degraded or (decision.private and not work.plan.private):
            return  # the latter: its key does not keep it from others
        if isinstance(pieces[0], Embeddings):
            answer = StoredAnswer(target.name, target.model, pieces[0])
        else:
            chunks = [piece for piece in pieces if isinstance(piece, Chunk)]
            if any(chunk.finish_reason == "content_filter" for chunk in chunks):
                return
            answer = StoredAnswer(target.name, target.model, CachedAnswer(work.request, target.model, chunks))
        self._cache.put(work.key, answer, durable=not work.on_device)

    def _settle(self, story: RequestContext, ended: float) -> None:
        outcome = story.outcome(ended)
        record = story.record(outcome, self._clock.unix())
        self._decisions.add(record)
        self._metrics.request_finished(outcome)
        if story.trace is not None and not story.work.on_device:
            story.trace.end(record, shared=story.work.trace if story.shared else None)


async def _listen(listener: Subscriber, story: RequestContext) -> None:
    while (piece := await listener.next(story.deadline)) is not None:
        if not story.committed and listener.flight.head is not None:
            await story.commit(listener.flight.head)
        await story.send(piece)


def _is_fresh(found: CacheHit, plan: CachePlan) -> bool:
    return plan.exact is not None and found.age_s < plan.exact.ttl_s


def _may_be_stale(found: CacheHit, plan: CachePlan, error: CausewayError) -> bool:
    """An old answer instead of an error: only where the targets failed, not where the policy or the caller said no."""
    failed = isinstance(error, (AllAttemptsFailed, BackendError, DeadlineExceeded, QueueFull))
    return failed and plan.exact is not None and found.age_s < plan.exact.ttl_s + plan.exact.stale_if_error_s
