"""The service, which takes one request through all steps from admission to its outcome.

Start reading here: this is the table of steps.

    bytes → Request      `http.api`: parse and validate once
    admission            `requests`: a rate limit per client; a bounded queue in front of bounded concurrency
    cache                `storage.cache`: the policy's cache rule, an exact answer; `semantic`: the answer to a question
                         with the same meaning; `requests`: identical requests in progress share one answer
    Request → Decision   `router.decision.decide`: pure; `on_demand_signals`: its inputs, if the policy names them
    Decision → Chunks    `generation`: run targets in order; after the first byte no other target may answer
    Chunks → Outcome     `requests`: exactly one per request: metrics, trace, decision record

A cache hit needs no permit: it does not queue behind the work that it saves. A chat that the first cloud answers,
as most are that are passed on, takes the same hops in callbacks (`direct`). The files that one streamed answer of the
device passes, in order, are listed in docs/explanation/hops.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from causeway_server.router.anthropic.replies import UNCOUNTED
from causeway_server.router.decision.attempts import AttemptSequence
from causeway_server.router.decision.candidates import most_usd, scores
from causeway_server.router.decision.decide import (
    CachePlanner,
    RequestMemo,
    decide,
    decide_memoized,
    early_bypass,
    until_first_cloud,
    without_down,
)
from causeway_server.router.decision.pacing import finite, steps_of
from causeway_server.router.decision.sessions import NO_SESSION
from causeway_server.router.errors import (
    AllAttemptsFailed,
    BackendError,
    CausewayError,
    ClientGone,
    DeadlineExceeded,
    Draining,
    QueueFull,
    UnsupportedFeature,
)
from causeway_server.router.openai.answer import CachedAnswer, is_keepable
from causeway_server.router.openai.tokens import TokenizeRequest, TokenList
from causeway_server.router.parts.reading import first_part
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import ON_DEMAND
from causeway_server.router.residency import permits
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.reply import AnswerHead, Reply
from causeway_server.router.types import (
    AUTO,
    CachePlan,
    Chunk,
    Decision,
    Embeddings,
    Estimates,
    Location,
    Message,
    Request,
    Snapshot,
    Target,
)

from ..backends.backend import JobTerms
from ..observability.logs import log_arrival, log_decision, log_outcome
from ..signals.collector import SignalCollector
from ..signals.semantic import SemanticAnswers
from ..storage.cache import AnswerCache, CacheHit, StoredAnswer
from .agent_sessions import AgentSessions, written
from .generation import AttemptRunner, Generation, SemanticCheck, Tokenizer
from .on_demand_signals import LENGTH, OnDemandSignals
from .requests import Admission, Records, RequestContext, SharedGeneration, SharedGenerations, Subscriber, rank_of

if TYPE_CHECKING:
    from .shadow import Shadows

log = logging.getLogger(__name__)

_PREVIEW_S = 1.0  # timeout of the on-demand signals of a job's decision
_ON_DEMAND = frozenset(ON_DEMAND)


async def _pin_nothing(_: str) -> bool:
    return False


_JOB = JobTerms("", "standard", _pin_nothing)  # id of a preview
_NO_ESTIMATES = Estimates()
_SELF_CHECK_REQUEST = Request(
    kind="chat", model=AUTO, messages=(Message(role="user", content="Are you there?"),), max_tokens=1
)


class Explanation(msgspec.Struct, frozen=True):
    """The plan of the policy for a request now. `cached_age_s` None: no cached answer.

    `similarity`: that of the cached answer's question; None for the same request, or without a cached answer.
    """

    cache: CachePlan
    cached_age_s: float | None
    decision: Decision
    estimates: Estimates
    snapshot: Snapshot
    similarity: float | None = None


@dataclass(frozen=True)
class AnswerSources:
    """Sources of answers that need no attempt: stored ones, those in progress, and, under policies with `semantic`
    rules, those to questions with the same meaning.
    """

    cache: AnswerCache
    semantic: SemanticAnswers
    shared_generations: SharedGenerations


@dataclass(eq=False, repr=False, kw_only=True)
class Service:
    """Answers requests under the policy that `use` activated last."""

    admission: Admission
    sources: AnswerSources  # sources of answers that need no attempt
    attempts: AttemptRunner
    signals: SignalCollector
    on_demand: OnDemandSignals  # computes the signals that are computed only if the policy names them
    records: Records  # destinations of outcomes
    shadows: Shadows  # shadow requests, which follow some answers; used only by policies with `shadow`
    default_deadline_s: float  # deadline of a request that names none
    sessions: AgentSessions  # Sessions; used only by policies with `session`
    direct_policy: Policy | None = field(init=False, default=None)
    """The active policy, if requests may be decided under it without a task (`direct`)."""
    _planner: CachePlanner = field(default_factory=CachePlanner)
    _policy: Policy = field(init=False)

    def use(self, policy: Policy, scope: bytes = b"") -> None:
        """Activate `policy` for requests that arrive now. `scope`: extra cache-key bytes, such as model hashes."""
        self._policy = policy
        reads = policy.guard or policy.priced or not policy.reads_only_features or self.on_demand.record_all
        keeps_samples = any(rule.allow_sampled for rule in policy.cache)
        self.direct_policy = None if reads or policy.paced or policy.places or keeps_samples else policy
        self.records.variants.use(policy)
        self._planner = CachePlanner(scope)
        self.sources.semantic.activate(policy)

    async def answer(self, context: RequestContext, *, is_begun: bool = False) -> None:
        """Answer a request; return when the last byte is passed to the client's connection. `is_begun`: it goes on
        after callbacks (`direct`). Raises the client's CausewayError; CancelledError if the client disconnected.
        """
        if not is_begun:
            self.begin(context)
        if log.isEnabledFor(logging.DEBUG):
            log_arrival(context.id, context.request)
        try:
            try:
                await self._hops(context)
            except CausewayError as error:
                if isinstance(error, ClientGone) or not context.reply.finished:
                    raise
                log.info("The error %s came after the end of an answer.", error.code)  # the answer already has its end
            if context.session is not None:
                await written(self._keep_session(context))  # the client's next request may come after a crash
            await context.reply.end()
        except CausewayError as error:
            context.error = error
            raise
        except asyncio.CancelledError:
            # a client may disconnect without waiting for the stream's end: it has its answer
            if context.reply.finished:
                self._keep_session(context)
                if not self.admission.ending:
                    raise
                await context.reply.end()
                return
            if self.admission.ending:
                context.error = Draining("This server shut down before the answer was complete.", retry_after_s=1.0)
                raise context.error from None
            context.error = ClientGone("The client disconnected.")
            raise
        except Exception as failure:
            log.error("A request failed unexpectedly: %s", redacted(failure))
            context.error = CausewayError("Internal error.")
            raise context.error from failure
        finally:
            self.end(context)

    def end(self, context: RequestContext) -> None:
        """Record a request in the loop's next turn: the response leaves first, and the record exists before any other
        request can look for it.
        """
        asyncio.get_running_loop().call_soon(self._finish_request, context, self.records.clock.monotonic())

    def end_generation(self, generation: Generation) -> None:
        """Record a generation in the loop's next turn."""
        generation.finished = True
        asyncio.get_running_loop().call_soon(self._finish_generation, generation, self.records.clock.monotonic())

    def _keep_session(self, context: RequestContext) -> asyncio.Future[None] | None:
        if context.session is None or context.head is None:
            return None
        return self.sessions.keep(context.session, context.head, context.generation, context.usage)

    def _session_estimates(self, policy: Policy, request: Request) -> Estimates:
        return _NO_ESTIMATES if policy.session is None else self.sessions.estimates(policy, request)

    async def explain(self, request: Request) -> Explanation:
        """Return the plan of `answer` for a request, without running it."""
        now, policy = self.records.clock.monotonic(), self._policy_of(request)
        generation = Generation(
            "",
            request,
            policy,
            self.signals.recent_snapshot(policy),
            arrived=now,
            deadline=self.deadline(request, now),
            estimates=self._session_estimates(policy, request),
        )
        self.admission.admit(request.hints.client, now)
        if not self.on_demand.concerns(request):
            return await self._explain(generation)
        # Its parts go through the same child processes as those of requests that run: it takes turns with them.
        async with self.admission.permit(generation.first_byte_by, request.hints.client, rank_of(request.hints)):
            return await self._explain(generation)

    async def _explain(self, generation: Generation) -> Explanation:
        request = generation.request
        hit = None if self._bypasses(generation) else await self._find(generation, RequestMemo())
        if hit is None or not _is_fresh(hit, generation.cache_plan):
            hit = await self._find_similar(generation) or hit
        policy, estimates = generation.policy, generation.estimates
        generation.cache_plan = self._planner.plan(policy, request, generation.snapshot, estimates).plan
        generation.snapshot = self.signals.snapshot(policy)
        decision = await self._decide(generation)
        return Explanation(
            cache=generation.cache_plan,
            cached_age_s=None if hit is None else hit.age_s,
            similarity=None if hit is None else hit.similarity,
            decision=decision,
            estimates=generation.estimates,
            snapshot=generation.snapshot,
        )

    async def tokenize(self, asked: TokenizeRequest) -> tuple[str, TokenList]:
        """Return the first target on the device that would answer a request, and the tokens of its prompt there. Raises
        UnsupportedFeature without one, or for parts other than text; InvalidRequest; EngineUnavailable.
        """
        request = asked.request
        if path := first_part(request)[0]:
            raise UnsupportedFeature(UNCOUNTED.format(path), param=path)
        target, tokenizer, deadline = await self._tokenizer_of(request)
        async with _counting_until(deadline):
            found = await tokenizer.tokenize(request, target.model, adds_special=asked.adds_special)
        return target.name, found

    async def detokenize(self, request: Request, tokens: tuple[int, ...]) -> tuple[str, str]:
        """Return the first target on the device that would answer, and the tokens' text. Raises as `tokenize`."""
        target, tokenizer, deadline = await self._tokenizer_of(request)
        async with _counting_until(deadline):
            return target.name, await tokenizer.detokenize(tokens, target.model)

    async def _tokenizer_of(self, request: Request) -> tuple[Target, Tokenizer, float]:
        now, policy = self.records.clock.monotonic(), self._policy_of(request)
        self.admission.admit(request.hints.client, now)
        deadline = self.deadline(request, now)
        snapshot = self.signals.snapshot(policy)
        session = self._session_estimates(policy, request)
        generation = Generation("", request, policy, snapshot, arrived=now, deadline=deadline, estimates=session)
        decision = await self._decide(generation)
        target = next((plan.target for plan in decision.attempts if plan.target.at == "edge"), None)
        tokenizer = self.attempts.tokenizer
        if target is None or tokenizer is None:
            message = "`model`: no target on this device would answer, and it counts for its own models only."
            raise UnsupportedFeature(message, param="model")
        return target, tokenizer, deadline

    @property
    def revision(self) -> str:
        """The revision of the active policy."""
        return self._policy.revision

    @property
    def draining(self) -> bool:
        """Whether the daemon is shutting down."""
        return self.admission.draining

    def admit(self, client: str) -> None:
        """Charge one job to the client's rate. Raises RateLimited or Draining."""
        self.admission.admit(client, self.records.clock.monotonic())

    async def bind_session(self, request: Request) -> None:
        """Bind the session of a request that was read and may become a job, as `answer` does."""
        policy = self._policy_of(request)
        if policy.session is not None and (turn := self.sessions.turn(policy, request)) is not None:
            snapshot = self.signals.recent_snapshot(policy)
            await written(self.sessions.arrive(policy, request, turn, snapshot))

    async def preview(self, request: Request) -> Decision:
        """Return the decision for a job now, without running it. Raises InvalidRequest or ModelNotFound."""
        now, policy = self.records.clock.monotonic(), self._policy_of(request)
        snapshot, session = self.signals.snapshot(policy), self._session_estimates(policy, request)
        deadline = now + _PREVIEW_S
        generation = Generation("", request, policy, snapshot, now, deadline, job=_JOB, estimates=session)
        return await self._decide(generation)

    def self_check(self) -> Decision:
        """Make a trial routing decision, for the watchdog and `/healthz`; it is not run, counted or recorded."""
        snapshot = self.signals.snapshot(self._policy)
        self._planner.plan(self._policy, _SELF_CHECK_REQUEST, snapshot, _NO_ESTIMATES)
        return decide(self._policy, _SELF_CHECK_REQUEST, snapshot, _NO_ESTIMATES)

    def begin(self, context: RequestContext) -> None:
        """Set the deadline and the generation of a request."""
        policy = self._policy_of(context.request)
        context.deadline = self.deadline(context.request, context.arrived, is_job=context.job is not None)
        generation = Generation(
            context.id,
            context.request,
            policy,
            self.signals.recent_snapshot(policy),
            arrived=context.arrived,
            deadline=context.deadline,
            job=context.job,
            features=context.features,
        )
        generation.traceparent, generation.trace = context.traceparent, context.trace
        if policy.session is not None and (turn := self.sessions.turn(policy, context.request)) is not None:
            context.session = generation.session = turn
            generation.estimates = Estimates(session=turn.session)
        context.follow(generation)

    def _policy_of(self, request: Request) -> Policy:
        """Return the policy under which a request runs: the active one, with the variants that answer it."""
        policy = self._policy
        return self.records.variants.policy_of(policy, request) if policy.places else policy

    def place_of(self, target: str) -> Location | None:
        """Return the place of one of the active policy's targets."""
        return next((one.at for one in self._policy.targets if one.name == target), None)

    def deadline(self, request: Request, arrived: float, *, is_job: bool = False) -> float:
        """Return the deadline of a request, monotonic seconds."""
        if request.hints.deadline_ms is None:
            return arrived + self.default_deadline_s
        if is_job:
            return arrived + request.hints.deadline_ms / 1000.0
        return arrived + min(self.default_deadline_s, request.hints.deadline_ms / 1000.0)

    # --- hops --------------------------------------------------------------------------------------------------------

    async def _hops(self, context: RequestContext) -> None:
        generation = context.generation
        if generation.begun is not None:
            await self._generate(generation, context)
            return
        if (turn := context.session) is not None:
            await written(self.sessions.arrive(generation.policy, context.request, turn, generation.snapshot))
        client = context.request.hints.client
        if context.job is None:
            self.admission.admit(client, context.arrived)
        else:  # it was charged when it was accepted
            self.admission.check_budgets(client, context.arrived)
        hit = None if self._bypasses(generation) else await self._find(generation, context.memo)
        if hit is not None and _is_fresh(hit, generation.cache_plan):
            await context.replay(hit)
            return
        if generation.cache_plan.semantic is not None:
            share = self.shadows.checks.share(generation) if self.admission.has_room else 0.0
            similar = await self._find_similar(generation, share)
            if similar is not None:
                await context.replay(similar)
                return
        if context.job is not None:  # no other request may wait for it, and it may wait for a complete answer
            await self._generate(generation, context, waits=False)
            return
        try:
            if generation.cache_key is None:
                await self._generate(generation, context)
            else:
                await self._share(context, generation.cache_key)
        except CausewayError as error:
            if context.committed:
                raise
            await self._replay_instead(context, generation, hit, error)

    async def _replay_instead(
        self, context: RequestContext, generation: Generation, hit: CacheHit | None, error: CausewayError
    ) -> None:
        """Answer with a cached answer, because no new one could be made. Raises `error` if there is none."""
        if generation.semantic_check is not None and not isinstance(error, ClientGone):
            self.shadows.checks.fail()
            await context.replay(generation.semantic_check.hit, check=error)
        elif hit is not None and _may_be_stale(hit, context.generation.cache_plan, error):
            await context.replay(hit, stale=error)
        else:
            raise error

    def _bypasses(self, generation: Generation) -> bool:
        """Return whether the request cannot be cached under any rule."""
        bypass = early_bypass(generation.policy, generation.request)
        if bypass:
            generation.cache_plan = bypassed(bypass)
        if (session := generation.estimates.session) is not None:
            plan = self.sessions.bypass(generation.policy, session)
            generation.cache_plan = plan or generation.cache_plan
            return bool(bypass) or plan is not None
        return bool(bypass)

    def hit_in_memory(self, policy: Policy, request: Request, memo: RequestMemo) -> tuple[CacheHit, Snapshot] | None:
        """Return the answer that `answer` would replay at once, with the signals; None if it must look further."""
        needs_more = policy.session is not None or not _ON_DEMAND.isdisjoint(policy.cache_needs.signals)
        if needs_more or early_bypass(policy, request):
            return None
        snapshot = self.signals.recent_snapshot(policy)
        planned = self._planner.plan_memoized(policy, request, snapshot, memo)
        hit = None if planned.key is None else self.sources.cache.lookup_memory(planned.key)
        return None if hit is None or not _is_fresh(hit, planned.plan) else (hit, snapshot)

    async def _find(self, generation: Generation, memo: RequestMemo) -> CacheHit | None:
        """Return the stored answer to the request, however old; None if there is none or the policy forbids it."""
        policy, request = generation.policy, generation.request
        if not _ON_DEMAND.isdisjoint(policy.cache_needs.signals):
            await self.on_demand.compute(generation, policy.cache_needs.signals)
            planned = self._planner.plan(policy, request, generation.snapshot, generation.estimates)
        else:
            planned = self._planner.plan_memoized(policy, request, generation.snapshot, memo)
        generation.cache_plan, generation.cache_key = planned.plan, planned.key
        if generation.cache_key is None:
            return None
        hit = self.sources.cache.lookup_memory(generation.cache_key)
        if hit is None and not generation.on_device:
            hit = await self.sources.cache.lookup_disk(generation.cache_key, request)
        return hit

    async def _find_similar(self, generation: Generation, check_share: float = 0.0) -> CacheHit | None:
        """Return a fresh answer of the same client and meaning; `check_share` of them are made again."""
        plan, semantic = generation.cache_plan, self.sources.semantic
        if plan.semantic is None:
            return None
        request = generation.request
        question = generation.semantic_question = semantic.question(request)
        if question is None:
            return None
        scope = generation.semantic_scope = self._planner.semantic_scope(generation.policy, request, plan)
        if check_share:
            semantic.look_up(check_share)
        match = semantic.find(scope, question, plan.semantic.max_error)
        if match is None:
            return None
        hit = self.sources.cache.lookup_memory(match.key)
        if hit is None and not generation.on_device:
            hit = await self.sources.cache.lookup_disk(match.key, request)
        if hit is None:
            semantic.forget(match.key)
        if hit is None or hit.age_s >= plan.semantic.ttl_s:
            return None
        similar = msgspec.structs.replace(hit, similarity=match.similarity)
        if check_share and self.shadows.checks.draw(check_share):
            generation.semantic_check = SemanticCheck(match.log_odds, similar)
            return None
        return similar

    async def _share(self, context: RequestContext, key: bytes) -> None:
        """Answer from a generation that identical requests in progress share."""
        generations, own_generation = self.sources.shared_generations, context.generation
        key += b"stream" if context.request.stream else b"whole"
        while True:
            with generations.join(key, own_generation, self._generate_shared) as (subscriber, started):
                context.follow(subscriber.shared.generation, shared=not started)
                try:
                    await _forward(subscriber, context)
                    return
                except CausewayError as error:
                    if started or context.committed or isinstance(error, ClientGone):
                        raise
                    # Start a separate generation if the other request (1) had an earlier deadline, or (2) has a
                    # cached answer, so that its generation gave up early.
                    earlier = isinstance(error, DeadlineExceeded) and self.records.clock.monotonic() < context.deadline
                    checked = subscriber.shared.generation.semantic_check is not None
                    if not earlier and not (checked and own_generation.semantic_check is None):
                        raise
            context.follow(own_generation)

    async def _generate_shared(self, shared: SharedGeneration) -> None:
        await self._generate(shared.generation, shared)
        if shared.whole:
            self._store(shared)

    async def _generate(self, generation: Generation, reply: Reply[AnswerHead], *, waits: bool = True) -> None:
        """Generate an answer: wait for a permit, decide, run the attempts. `waits`: whether it needs a permit."""
        admission, loop, begun = self.admission, asyncio.get_running_loop(), generation.begun
        if begun is None and waits and not admission.try_acquire():
            hints = generation.request.hints
            await admission.acquire(generation.first_byte_by, hints.client, rank_of(hints))
        started, decided = loop.time() if begun is None else begun.started, False
        try:
            if begun is None:
                generation.snapshot = self.signals.snapshot(generation.policy)
                await self._decide(generation)
            decision = generation.decision
            assert decision is not None
            if generation.policy.paced:
                self._reserve(generation, decision)
            if generation.session is not None:
                await written(self.sessions.bind(generation.session, generation))
            tap = None if decision.shadow is None else self.shadows.tap(generation, reply)
            decided = True
            await self.attempts.run(generation, reply if tap is None else tap)
            if tap is not None:
                generation.shadow = self.shadows.put(tap)
        finally:
            if decided:
                self.end_generation(generation)
            else:
                self.records.spend.reserved_usd -= generation.reserved_usd
            if waits:
                admission.release(loop.time() - started)

    async def _decide(self, generation: Generation) -> Decision:
        policy, request = generation.policy, generation.request
        needs = policy.route_needs if request.model == AUTO else policy.constraint_needs
        if self.on_demand.record_all:
            await self.on_demand.compute(generation, _ON_DEMAND)
        elif not _ON_DEMAND.isdisjoint(needs.signals):
            await self.on_demand.compute(generation, needs.signals)
        if policy.priced:
            await self.on_demand.compute(generation, policy.priced)
        if policy.compared and request.model == AUTO:
            await self.on_demand.compare(generation)
        if policy.budget_usd is not None:
            await self.on_demand.compute(generation, LENGTH)
            spend = self.records.spend.paced(policy.budget_usd)
            generation.snapshot = msgspec.structs.replace(generation.snapshot, spend=spend)
        snapshot = generation.snapshot if generation.job is None else without_down(generation.snapshot)
        features = generation.features
        if features is None:
            decision = decide(policy, request, snapshot, generation.estimates)
        else:
            decision = decide_memoized(policy, request, snapshot, generation.estimates, features)
        if generation.job is not None:
            decision = until_first_cloud(decision, generation.snapshot.down)
        generation.decision = decision
        choices = request.n * max(1, len(request.prompts))
        generation.sequence = AttemptSequence(
            decision, stream=request.stream, choices=choices, arrived=generation.arrived
        )
        if log.isEnabledFor(logging.DEBUG) and generation.id:
            log_decision(generation.id, decision)
        return decision

    def _reserve(self, generation: Generation, decision: Decision) -> None:
        """Hold back what the answer may cost, in the step that decided it, and take note of what could be chosen."""
        request, estimates, spend = generation.request, generation.estimates, self.records.spend
        dear = {plan.target.key: plan.target for plan in decision.attempts if plan.target.price.costs}
        generation.reserved_usd = sum(most_usd(target, request, estimates) for target in dear.values())
        spend.reserved_usd += generation.reserved_usd
        weights = next((route.best_of for route in generation.policy.routes if route.name == decision.rule), None)
        snapshot = generation.snapshot
        if weights is not None:
            dropped = {reason.target for reason in decision.reasons if reason.code == "budget_excluded"}
            found = (target for target in generation.policy.compared if target.key in dropped)
            listed = dict.fromkeys((*(plan.target for plan in decision.attempts), *found))
            targets = tuple([target for target in listed if snapshot.down.isdisjoint((target.key, target.name))])
            session = estimates.session or NO_SESSION
            costs = scores(targets, "", weights, request, (snapshot, estimates), [], session)
            usd_price, wh_price = finite(snapshot.spend.price), finite(snapshot.energy.price)
            if generation.policy.budget_usd is not None:
                spend.offer(steps_of((score - wh_price * wh, usd) for score, usd, wh, _ in costs))
            if generation.policy.paces_energy:
                self.signals.energy.offer(steps_of((score - usd_price * usd, wh) for score, usd, wh, _ in costs))

    # --- the end -----------------------------------------------------------------------------------------------------

    def _store(self, shared: SharedGeneration) -> None:
        """Cache the answer, unless a hit would differ from the answer of the policy's first choice."""
        generation, pieces = shared.generation, shared.pieces()
        target, decision = generation.target, generation.decision
        assert target is not None
        assert decision is not None
        assert generation.cache_key is not None
        if (
            generation.degraded
            or generation.trimmed is not None
            or (decision.private and not generation.cache_plan.private)
        ):
            return  # a hit could not say so; and the key would not keep a private answer from other clients
        if isinstance(pieces[0], Embeddings):
            answer = StoredAnswer(target.name, target.model, pieces[0])
        else:
            chunks = [piece for piece in pieces if isinstance(piece, Chunk)]
            cached = CachedAnswer(generation.request, target.model, chunks)
            if not is_keepable(generation.request, cached.choices, cached.usage):
                return
            answer = StoredAnswer(target.name, target.model, cached)
        if generation.semantic_check is not None:
            self.shadows.checks.compare(generation, generation.semantic_check, answer)
        owner = generation.request.hints.client
        self.sources.cache.put(generation.cache_key, answer, owner=owner, durable=not generation.on_device)
        if generation.semantic_question is not None:
            self.sources.semantic.add(generation.semantic_scope, generation.semantic_question, generation.cache_key)

    def _finish_generation(self, generation: Generation, ended: float) -> None:
        """Record a generation, once for all requests that share it."""
        usd = generation.usd()
        self.records.spend.reserved_usd -= generation.reserved_usd
        if usd > 0.0:
            self.records.spend.add(usd)
        if generation.semantic_check is not None:
            self.shadows.checks.charge(usd)
        attempts = generation.records(ended)
        if generation.policy.places:
            self.records.variants.count(generation)
        if generation.policy.compared:
            self.on_demand.observe(generation, attempts)
        if generation.policy.paces_energy:
            self.signals.energy.answered(attempts, ended)
        self.records.metrics.generation_finished(
            generation.request,
            attempts,
            generation.target if generation.committed else None,
            generation.usage,
            usd=usd,
            degraded=generation.degraded,
        )

    def _finish_request(self, context: RequestContext, ended: float) -> None:
        record = context.finish(ended, self.records.clock.unix())
        if context.generation.policy.places:
            group = self.records.variants.group(record.outcome.target, context.request)
            record = msgspec.structs.replace(record, trial_group=group)
        if (budgets := self.admission.budgets) is not None and record.outcome.route != "cache" and not context.shared:
            budgets.charge(context.request.hints.client, context.generation.tokens, record.outcome.usd, ended)
        self.records.decisions.add(record)
        self.records.metrics.request_finished(record.outcome)
        if log.isEnabledFor(logging.DEBUG):
            log_outcome(record)
        if context.trace is not None and not self._is_bound(context, context.trace.region):
            context.trace.end(record, shared=context.generation.trace if context.shared else None)

    def _is_bound(self, context: RequestContext, region: str) -> bool:
        """Return whether the request is bound to the device, or to other regions than a collector's; one that was
        refused undecided is decided now.
        """
        generation = context.generation
        if generation.on_device:
            return True
        decided: Decision | CachePlan | None = generation.decision
        if decided is None and context.head is not None:
            decided = generation.cache_plan  # the cache answered
        if decided is None:
            try:
                decided = decide(generation.policy, generation.request, generation.snapshot, generation.estimates)
            except CausewayError:
                return True  # its constraints are unknown
            if decided.on_device:
                return True
        return decided.regions is not None and not permits(frozenset(decided.regions), region)


@asynccontextmanager
async def _counting_until(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("The deadline passed before the tokens were counted.") from None


async def _forward(subscriber: Subscriber, context: RequestContext) -> None:
    shared = subscriber.shared
    while (piece := await shared.read(subscriber, context.deadline)) is not None:
        if not context.committed and shared.head is not None:
            await context.commit(shared.head)
        if (slow := context.send(piece)) is not None:
            await slow


@lru_cache(64)
def bypassed(reason: str) -> CachePlan:
    return CachePlan(bypass=reason)


def _is_fresh(hit: CacheHit, plan: CachePlan) -> bool:
    return plan.exact is not None and hit.age_s < plan.exact.ttl_s


def _may_be_stale(hit: CacheHit, plan: CachePlan, error: CausewayError) -> bool:
    """Return whether an expired answer may replace `error`: only if targets failed, not if the request was refused."""
    failed = isinstance(error, (AllAttemptsFailed, BackendError, DeadlineExceeded, QueueFull))
    return failed and plan.exact is not None and hit.age_s < plan.exact.ttl_s + plan.exact.stale_if_error_s
