"""Shadow requests: after some answers the other side is asked the same, and both answers are compared.

They must not affect any client:

1. They start after the answer, one at a time. A few wait; further ones are dropped.
2. On the device they run only while no request runs or waits, and end within a decode step when one comes. The cloud
   gets them as bulk work, and only while a permit is free; their results change neither breaker nor health.
3. They hold no permit, and end when the daemon drains.
4. Their cost counts in `spend.*`; one that could exceed the policy's budget of the day is not sent, nor one to the
   device while energy has a price.
5. A refit of the calibration (`signals.refits`) runs only while no request runs or waits, the device is neither
   throttled nor low on battery, and energy has no price. A request that wants a permit cancels it.

Prompt and answers are in memory while a shadow request waits and runs, and are then discarded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import anyio
import msgspec

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.signals.promise import PromiseDraw
from causeway_server.router.decision.attempts import Attempt
from causeway_server.router.decision.decide import other_target
from causeway_server.router.decision.features import question_of
from causeway_server.router.errors import BackendError, CausewayError
from causeway_server.router.openai.answer import CachedAnswer
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import wants_tools
from causeway_server.router.prices import PICO_USD
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.serving.reply import AnswerHead, Piece, Reply
from causeway_server.router.types import (
    AttemptRecord,
    Chunk,
    Confidence,
    DecisionRecord,
    DeviceSignals,
    Location,
    Request,
    RoutingHints,
    Target,
    Usage,
)
from causeway_server.router.variants.feedback import GOOD_SCORE

from ..backends.backend import Backend, BackendRequest, UpstreamInfo
from ..clock import Clock
from ..observability.metrics import Metrics
from ..signals.energy import EnergyBudget
from ..signals.estimators import prompt_text
from ..signals.semantic import SemanticAnswers
from ..storage.background_sqlite import SqliteStats
from ..storage.cache import StoredAnswer
from ..storage.spend import SpendStore
from .generation import Generation, SemanticCheck, close_chunks, policy_label, with_temperature
from .requests import Admission

if TYPE_CHECKING:
    from ..signals.shadow import ShadowObserver
    from ..storage.shadow import ShadowStore

log = logging.getLogger(__name__)

_CONFIDENCE_TOKENS = 24  # if the route has no handoff
MAX_CHARACTERS = 32_768  # maximum characters of a prompt or an answer that is compared
_LONGER, _MORE_TOKENS = 4, 64  # limit of the other answer: this multiple of the tokens, plus this many
_CHARACTERS_PER_TOKEN = 2  # characters per token, nearly always more; for the maximum cost of a prompt
_MAX_WAITING = 8
_MAX_WAIT_S = 600.0
_MAX_IDLE_WAIT_S = 60.0
_TRIES = 3  # number of times that a client's request may interrupt one on the device
_WHOLE_S = 120.0
_LOW_BATTERY = 0.3
Result = Literal["agreed", "disagreed", "failed", "interrupted", "over_budget", "dropped"]


class Labelled(Protocol):
    """Counts a labelled answer. `confidence`: of the device's answer; `on_device`: the device gave it."""

    def __call__(self, confidence: float | None, *, good: bool, on_device: bool) -> None: ...


class SemanticChecks:
    """Chooses which semantic answers are checked, and compares them: under a policy with `shadow`, a share of them.

    1. The client gets the new answer, as without the semantic match: no request is sent only for the check.
    2. Requests that are bound to the device, sampled, or have tools or several choices are never checked; truncated
       answers, and answers of different models, are not compared.
    3. A check never costs a client its answer: if the new one fails or would be degraded before its first byte, the
       client gets the cached one. A check does not queue, and leaves time before the request's deadline.
    4. New answers are charged to the budget of shadow requests; once it is used up, checks stop.
    5. Only counts and the judge's log-odds are kept. `models.semantic.judge` draws the conclusions.
    """

    def __init__(self, semantic: SemanticAnswers, metrics: Metrics, rng: random.Random) -> None:
        self._semantic = semantic
        self._metrics = metrics
        self._rng = rng
        self._policy: Policy | None = None
        self._store: ShadowStore | None = None

    def use(self, policy: Policy, store: ShadowStore | None) -> None:
        """Follow another policy. `store`: the store of its shadow requests; None: checks are off."""
        self._policy, self._store = policy, store

    def restore(self, store: ShadowStore) -> None:
        """Add the results of an earlier run, once `store` has read them."""
        if store.earlier_findings is not None:
            self._semantic.restore(store.earlier_findings)

    def share(self, generation: Generation) -> float:
        """Return the probability with which a semantic answer to this request is checked."""
        policy, request = generation.policy, generation.request
        shadow = policy.shadow
        if shadow is None or self._store is None or policy is not self._policy or generation.job is not None:
            return 0.0
        sampled = request.sampling.temperature not in (None, 0.0)
        if generation.on_device or sampled or request.sequences != 1 or wants_tools(request):
            return 0.0
        return shadow.share if self._store.usd_today < shadow.usd_per_day else 0.0

    def draw(self, share: float) -> bool:
        """Return whether this semantic answer is checked."""
        return self._rng.random() < share

    def compare(self, generation: Generation, check: SemanticCheck, new: StoredAnswer) -> None:
        """Compare both answers, and keep the result."""
        findings = self._semantic.findings
        if self._store is None or findings is None:
            return
        earlier = check.hit.answer
        texts = _text(earlier), _text(new)
        if texts[0] is None or texts[1] is None or earlier.model != new.model:
            return
        question = question_of(generation.request) or ""
        agreed = self._semantic.compare(check.log_odds, question, texts[0], texts[1])
        self._store.keep_findings(findings)
        self._metrics.semantic_checks.add(("agreed" if agreed else "disagreed",))

    def fail(self) -> None:
        """Count a check whose client got the cached answer, because the new one failed."""
        self._metrics.semantic_checks.add(("failed",))

    def charge(self, usd: float) -> None:
        """Count the cost of a new answer, or of a failed attempt."""
        if self._store is not None and usd > 0.0:
            self._store.add(usd)


def device_confidence(attempts: Sequence[Attempt] | Sequence[AttemptRecord]) -> Confidence | None:
    """Return the confidence of the device's first tokens; None if it made no answer, or reported none."""
    for attempt in attempts:
        at = attempt.at if isinstance(attempt, AttemptRecord) else attempt.plan.target.at
        if at == "edge" and attempt.confidence is not None:
            return attempt.confidence
    return None


def _spares_power(device: DeviceSignals) -> bool:
    """Return whether the device may do work that can wait."""
    low = bool(device.discharging) and device.battery is not None and device.battery < _LOW_BATTERY
    return not device.throttled and not low


def _text(answer: StoredAnswer) -> str | None:
    """Return the text of a complete answer that is short enough to compare; None for any other."""
    if not isinstance(answer.body, CachedAnswer):
        return None
    (choice, *_) = answer.body.choices
    return choice.text if choice.finish_reason == "stop" and len(choice.text) <= MAX_CHARACTERS else None


class ShadowTap:
    """Passes an answer on to its reply, and keeps its text for the comparison."""

    def __init__(self, generation: Generation, reply: Reply[AnswerHead], prompt: str) -> None:
        self.generation = generation
        self.prompt = prompt
        self.answer = ShadowText()
        self._reply = reply

    async def commit(self, head: AnswerHead) -> None:
        await self._reply.commit(head)

    def send(self, piece: Piece) -> Awaitable[None] | None:
        if isinstance(piece, Chunk):
            self.answer.add(piece)
        return self._reply.send(piece)


class ShadowText:
    """An answer's text, and the confidence of its first tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.confidence: Confidence | None = None
        self.ended = False  # whether `confidence` covers all tokens
        self.usage: Usage | None = None
        self.degraded = False  # whether another model than the target's answered
        self.score: Confidence | None = None  # as a handoff compares it, if it was asked for
        self._pieces: list[str] = []
        self._characters = 0
        self._finish_reason = ""

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def complete(self) -> bool:
        """Whether the model ended it, and it is short enough to be compared."""
        return self._finish_reason == "stop" and self._characters <= MAX_CHARACTERS

    @property
    def is_longer(self) -> bool:
        """Whether it goes on beyond the limit."""
        return self._finish_reason == "length" and not self.degraded

    def set_upstream(self, info: UpstreamInfo) -> None:
        self.degraded = info.degraded

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.usage = chunk.usage or self.usage
        if chunk.confidence is not None:
            self.confidence, self.ended = chunk.confidence, chunk.finish_reason is not None
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._characters += len(chunk.text)
        if self._characters <= MAX_CHARACTERS:
            self._pieces.append(chunk.text)


class ShadowQuestion(msgspec.Struct, frozen=True):
    """A complete answer, and the target that is asked the same. `since`: monotonic seconds."""

    generation: Generation
    prompt: str
    answer: ShadowText
    answered: Target
    other: Target
    since: float
    draw: PromiseDraw | None = None  # for the route's promise

    @property
    def confidence(self) -> Confidence | None:
        """The confidence of the device's first tokens, as the handoff compared it; None if it made none."""
        sequence = self.generation.sequence
        return None if sequence is None else device_confidence(sequence.attempts)

    @property
    def route(self) -> str:
        return "" if self.generation.decision is None else self.generation.decision.rule

    @property
    def after(self) -> int:
        """The number of tokens after which the route hands off, or would."""
        decision = self.generation.decision
        if decision is not None and decision.promise is not None:  # there may be none in its plans
            found = (one.handoff for one in self.generation.policy.routes if one.name == decision.rule)
            return next((one.after_tokens for one in found if one is not None), _CONFIDENCE_TOKENS)
        plans = () if decision is None else decision.attempts
        return next((plan.handoff.after_tokens for plan in plans if plan.handoff is not None), _CONFIDENCE_TOKENS)

    @property
    def answer_tokens(self) -> int:
        """The limit of the other answer in tokens: a much longer one does not agree."""
        return _LONGER * max(self.answer.tokens, self.generation.usage.completion_tokens) + _MORE_TOKENS

    @property
    def is_bounded(self) -> bool:
        """Whether `answer_tokens` bounds the other answer, and not the client's own limit."""
        most = self.generation.request.max_tokens
        return most is None or self.answer_tokens < most

    @property
    def most_usd(self) -> float:
        """The maximum cost of the other answer, US dollars."""
        request = self.generation.request
        characters = sum(len(str(message.content or "")) for message in request.messages) + len(self.prompt)
        prompt_tokens = max(self.generation.usage.prompt_tokens, characters // _CHARACTERS_PER_TOKEN)
        return Usage(prompt_tokens, self.answer_tokens).pico_usd(self.other.price) / PICO_USD

    @property
    def as_shadow(self) -> Request:
        """Return the request for the other target: complete, bulk, and with a token limit that bounds its price."""
        request = with_temperature(self.generation.request, self.other)
        limit = self.answer_tokens if request.max_tokens is None else min(self.answer_tokens, request.max_tokens)
        hints = RoutingHints(tags=("bulk",))
        return msgspec.structs.replace(
            request, stream=False, include_usage=False, logprobs=None, max_tokens=limit, hints=hints
        )


@dataclass(eq=False, repr=False, kw_only=True)
class Shadows:
    """Sends shadow requests under the policy that `use` activated last. `make` makes the store and the observer, when a
    policy needs them; it may raise ArtifactError or ImportError.
    """

    backends: Mapping[Location, Backend]
    admission: Admission  # reports when no client's request needs this device
    make: Callable[[], tuple[ShadowStore, ShadowObserver]]
    spend: SpendStore
    energy: EnergyBudget
    metrics: Metrics
    clock: Clock
    rng: random.Random
    checks: SemanticChecks  # checks of semantic answers, which share the store
    read_device: Callable[[], DeviceSignals] = DeviceSignals  # the last readings
    labelled: Labelled | None = None  # of a device in a fleet
    _policy: Policy | None = None
    _store: ShadowStore | None = None
    _observer: ShadowObserver | None = None
    _waiting: deque[ShadowQuestion] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _labelled: asyncio.Event = field(default_factory=asyncio.Event)
    _scope: anyio.CancelScope | None = None
    _refit_scope: anyio.CancelScope | None = None
    _stopped: bool = False
    _unusable: str = ""

    @property
    def waiting(self) -> int:
        """Number of answers that wait for their shadow request, including the running one."""
        return len(self._waiting) + (self._scope is not None)

    @property
    def problems(self) -> tuple[str, ...]:
        aside = {} if self._observer is None else self._observer.set_aside
        stats = self.disk()
        promises = () if self._observer is None else self._observer.promises.problems
        return (self._unusable, *aside.values(), *promises, "" if stats is None else stats.problem)

    @property
    def drift(self) -> float | None:
        """The largest drift of the active policy's calibrated signals; None without enough labels."""
        return None if self._observer is None else self._observer.drift

    def disk(self) -> SqliteStats | None:
        """Return the state of the file; None without one."""
        return None if self._store is None else self._store.disk()

    def samples(self) -> Iterator[Sample]:
        """Yield the cost of the policy's shadow requests today, and the quality of the calibrated signals."""
        if self._store is None or self._observer is None:
            return
        yield Sample("causeway_edge_shadow_usd_today", self._store.usd_today)
        yield from self._observer.samples()

    def use(self, policy: Policy) -> None:
        """Follow another policy; shadow requests that wait under the previous one are dropped."""
        self._drop_waiting()
        self._policy, self._unusable = policy, ""
        self._follow_policy(policy)
        self.checks.use(policy, self._store)

    def _follow_policy(self, policy: Policy) -> None:
        if policy.shadow is None:
            if self._observer is not None:
                self._observer.use(policy)
            return
        if self._store is None:
            try:
                self._store, self._observer = self.make()
            except (ArtifactError, ImportError) as error:
                self._unusable = f"no shadow requests are sent: {error}"
                log.warning(self._unusable)
                return
            self._wake.set()
        elif self._observer is not None:
            self._observer.look(policy.shadow.max_drift)
        if self._observer is not None:
            self._observer.use(policy)

    def tap(self, generation: Generation, reply: Reply[AnswerHead]) -> ShadowTap | None:
        """Return the reply of an answer that a shadow request will follow; None for any other answer."""
        decision, request = generation.decision, generation.request
        if decision is None or decision.shadow is None or self._observer is None or self._stopped:
            return None
        if generation.on_device or generation.job is not None or request.echo or request.suffix is not None:
            return None
        prompt = prompt_text(request)
        if prompt is None or len(prompt) > MAX_CHARACTERS:
            return None
        if decision.promise is None and self.rng.random() >= decision.shadow.share:
            return None
        return ShadowTap(generation, reply, prompt)

    def put(self, tap: ShadowTap) -> str:
        """Queue the shadow request of a complete answer; return the name of its target, or ""."""
        generation, answered = tap.generation, tap.generation.target
        assert generation.decision is not None
        other = None if answered is None else other_target(generation.decision.attempts, answered)
        if answered is None or other is None or not tap.answer.complete or generation.on_device or generation.degraded:
            return ""
        now = self.clock.monotonic()
        question = ShadowQuestion(generation, tap.prompt, tap.answer, answered, other, now)
        if generation.decision.promise is not None and (question := self._drawn(question)).draw is None:
            return ""
        if len(self._waiting) >= _MAX_WAITING or self._stopped or generation.policy is not self._policy:
            self._end(question, "dropped")
            return ""
        self._waiting.append(question)
        self._wake.set()
        return other.name

    def _drawn(self, question: ShadowQuestion) -> ShadowQuestion:
        """Count an answer of a route with a promise; return its question with the draw, if it is drawn."""
        assert self._observer is not None
        on_device, confidence = question.answered.at == "edge", question.confidence
        draw = self._observer.promises.draw(question.route, confidence, self.rng, on_device=on_device)
        return msgspec.structs.replace(question, draw=draw)

    def scored(self, record: DecisionRecord, score: float) -> None:
        """Take a client's score into account: a bad one of the device's answer speaks against its route's promise."""
        decision, policy = record.decision, self._policy
        if decision is None or decision.promise is None or self._observer is None or policy is None:
            return
        confidence = device_confidence(record.outcome.attempts)
        bad = score < GOOD_SCORE and record.outcome.route == "edge" and decision.revision == policy.revision
        if bad and confidence is not None:
            alarms = self._observer.promises.alarms
            self._observer.promises.object(decision.rule, confidence)
            self._keep_promises(alarms)

    def _keep_promises(self, alarms: int) -> None:
        """Store the evidence of promises. A new alarm, beyond so many `alarms`, ends the device's refits."""
        assert self._observer is not None
        if self._observer.promises.alarms > alarms:
            self._observer.refits.give_up("a promise raised an alarm")
            self._observer.look(self._max_drift)
        if self._store is not None:
            self._store.keep_promises(self._observer.promises.records)

    def stop(self) -> None:
        """Drop the waiting shadow requests and cancel the running one: the daemon drains."""
        self._stopped = True
        self._drop_waiting()
        for scope in (self._scope, self._refit_scope):
            if scope is not None:
                scope.cancel()

    def close(self) -> None:
        """Write queued records. Blocking: call it in a thread."""
        if self._store is not None:
            self._store.close()

    async def run(self) -> None:
        """Send shadow requests, one after the other, and refit the calibration, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_refits)
            await self._run_requests()

    async def _run_refits(self) -> None:
        while True:
            await self._labelled.wait()
            self._labelled.clear()
            for _ in range(_TRIES):
                if self._observer is None or self._observer.refits.due is None:
                    break
                await self.admission.idle()
                if self._stopped or self.energy.current.price or not _spares_power(self.read_device()):
                    break
                if self.admission.is_idle:
                    await self._refit(self._observer)

    async def _refit(self, observer: ShadowObserver) -> None:
        try:
            with anyio.CancelScope() as self._refit_scope, self.admission.spare():
                await observer.refits.run()
                observer.look(self._max_drift)
        except Exception as failure:
            log.error("The refit of a calibration failed unexpectedly: %s", redacted(failure))

    async def _run_requests(self) -> None:
        started = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not started and self._store is not None and self._observer is not None:
                started = True
                earlier = await self._store.restore(self._observer.window)
                self._observer.add(earlier, self._max_drift, restored=True)
                self._observer.promises.restore(self._store.earlier_promises)
                self.checks.restore(self._store)
                self._labelled.set()
            while self._waiting:
                await self._run_next(self._waiting.popleft())

    async def _run_next(self, question: ShadowQuestion) -> None:
        result: Result = "interrupted"
        with anyio.CancelScope() as self._scope:
            try:
                result = await self._follow(question)
            except (CausewayError, TimeoutError) as error:
                log.debug("A shadow request to %s failed: %s", question.other.name, type(error).__name__)
                result = "failed"
            except Exception as failure:
                log.error("A shadow request failed unexpectedly: %s", redacted(failure))
                result = "failed"
        self._scope = None
        self._end(question, result)

    async def _follow(self, question: ShadowQuestion) -> Result:
        """Ask the other side, compare, and store the result."""
        on_device = question.other.at == "edge"
        for _ in range(_TRIES if on_device else 1):
            if on_device:
                with anyio.move_on_after(_MAX_IDLE_WAIT_S):  # others wait behind it, which need no idle device
                    await self.admission.idle()
                if not self.admission.is_idle:
                    return "dropped"
            elif not self.admission.has_room:
                return "dropped"
            if self.clock.monotonic() - question.since > _MAX_WAIT_S:
                return "dropped"
            if not self._is_affordable(question):
                return "over_budget"
            with self.admission.spare() if on_device else nullcontext():
                text = await self._ask(question)
                if text.is_longer and question.draw is not None and question.is_bounded:
                    return self._label(question, text, agreed=False)
                return self._compare(question, text) if text.complete and not text.degraded else "failed"
        return "interrupted"

    async def _ask(self, question: ShadowQuestion) -> ShadowText:
        """Return the other side's answer. Its possible cost is charged however the request ends."""
        text, usd = ShadowText(), question.most_usd
        call = self._call(question, text)
        chunks = self.backends[question.other.at].generate(call)
        try:
            async with asyncio.timeout(_WHOLE_S):
                async for chunk in chunks:
                    text.add(chunk)
                    if question.draw is not None and chunk.confidence is not None and self._observer is not None:
                        quality = question.generation.estimates.quality
                        text.score = self._observer.score(call, chunk, quality)
            if text.usage is not None and text.usage.completion_tokens:
                usd = text.usage.pico_usd(question.other.price) / PICO_USD
        except BackendError as error:
            usd = 0.0 if error.phase == "connect" else usd
            raise
        finally:
            await close_chunks(chunks)
            self._charge(usd, question.other)
        return text

    def _call(self, question: ShadowQuestion, text: ShadowText) -> BackendRequest:
        whole_s = min(_WHOLE_S, question.other.timeout_s or _WHOLE_S)
        deadline = asyncio.get_running_loop().time() + whole_s
        return BackendRequest(
            id=question.generation.id,
            request=question.as_shadow,
            target=question.other,
            deadline=deadline,
            first_token_by=deadline,
            confidence_tokens=question.after if question.other.at == "edge" else 0,
            policy=policy_label(question.generation.policy),
            cacheable=False,
            durable=False,
            report_upstream=text.set_upstream,
            is_shadow=True,
        )

    def _compare(self, question: ShadowQuestion, text: ShadowText) -> Result:
        assert self._observer is not None
        assert self._store is not None
        on_device = question.answered.at == "edge"
        targets, texts = (question.answered, question.other), (question.answer, text)
        (small_target, large_target), (small, large) = (targets, texts) if on_device else (targets[::-1], texts[::-1])
        answer = self._observer.compare(
            question.prompt,
            (small_target.model, small.text),
            (large_target.model, large.text),
            # The client's answer has the calibrated one.
            question.generation.raw_confidence if on_device else small.confidence,
            ended=small.ended,
            route=question.route,
            after=question.after,
            client=question.generation.request.hints.client,
        )
        self._store.keep(answer)
        self._observer.add([answer], self._max_drift)
        self._labelled.set()
        return self._label(question, text, agreed=answer.agreed)

    def _label(self, question: ShadowQuestion, text: ShadowText, *, agreed: bool) -> Result:
        known = question.confidence
        confidence = text.score if known is None else known
        if self.labelled is not None:
            score = None if confidence is None else confidence.score
            self.labelled(score, good=agreed, on_device=question.answered.at == "edge")
        if question.draw is not None and self._observer is not None:
            alarms = self._observer.promises.alarms
            self._observer.promises.label(question.route, confidence, question.draw, good=agreed)
            self._keep_promises(alarms)
        return "agreed" if agreed else "disagreed"

    def _is_affordable(self, question: ShadowQuestion) -> bool:
        shadow = None if self._policy is None else self._policy.shadow
        if shadow is None or self._store is None or (question.other.at == "edge" and self.energy.current.price):
            return False
        return question.most_usd == 0.0 or self._store.usd_today + question.most_usd <= shadow.usd_per_day

    def _charge(self, usd: float, target: Target) -> None:
        if usd > 0.0 and self._store is not None:
            self._store.add(usd)
            self.spend.add(usd)
            self.metrics.cost.add((target.name,), usd)

    def _end(self, question: ShadowQuestion, result: Result) -> None:
        """Count a result; one that leaves no label is missing in the route's promise."""
        self.metrics.shadow_requests.add((question.other.name, result))
        if question.draw is not None and result not in ("agreed", "disagreed") and self._observer is not None:
            self._observer.promises.label(question.route, None, question.draw, good=None)

    def _drop_waiting(self) -> None:
        while self._waiting:
            self._end(self._waiting.popleft(), "dropped")

    @property
    def _max_drift(self) -> float:
        shadow = None if self._policy is None else self._policy.shadow
        return 1.0 if shadow is None else shadow.max_drift
