"""Shadow requests: after some answers the other side is asked the same, and both answers are compared.

They must not cost a client anything:

1. They start after the answer, one at a time. Few wait; what does not fit is dropped.
2. On the device they run only while no request runs or waits, and end within a decode step when one comes. The cloud
   gets them as bulk work, and only while a permit is free; what becomes of them changes neither the circuit breaker nor
   the model's health.
3. They hold no permit, and end when the daemon drains.
4. Their cost counts in `spend.*`; one that could exceed the policy's budget of the day is not sent.

Prompt and answers are in memory while a shadow request waits and runs, and nowhere afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

import anyio

from models.catalog.artifact import ArtifactError
from router.decision.decide import other_target
from router.errors import BackendError, CausewayError
from router.policy.compiled import Policy
from router.serving.gauges import Gauge
from router.serving.logs import redacted
from router.serving.reply import AnswerHead, Reply
from router.types import Location, Target

from ..backends.backend import Backend, BackendRequest
from ..clock import Clock
from ..observability.metrics import Metrics
from ..signals.estimators import prompt_text
from ..storage.background_sqlite import SqliteStats
from ..storage.spend import SpendStore
from .admission import Admission
from .attempts import close_chunks
from .generation import Generation, policy_label
from .semantic_checks import SemanticChecks
from .shadow_question import MOST_CHARACTERS, ShadowQuestion, ShadowTap, ShadowText

if TYPE_CHECKING:
    from ..signals.shadow import ShadowObserver
    from ..storage.shadow import ShadowStore

log = logging.getLogger(__name__)

_MOST_WAITING = 8
_LONGEST_WAIT_S = 600.0
_TRIES = 3  # on the device: how often a client's request may interrupt one
_WHOLE_S = 120.0

Result = Literal["agreed", "disagreed", "failed", "interrupted", "over_budget", "dropped"]


class Shadows:
    """Sends shadow requests under the policy that `use` activated last.

    Args:
        backends: What generates, by location.
        admission: Says when no client's request needs this box.
        make: Creates the store and the observer, when a policy needs them; may raise ArtifactError or ImportError.
        spend: Counts what they cost.
        metrics: Counts their results.
        clock: Monotonic time.
        chance: Draws which answers are followed by one.
        checks: Of semantic answers, which share the store.
    """

    def __init__(
        self,
        *,
        backends: Mapping[Location, Backend],
        admission: Admission,
        make: Callable[[], tuple[ShadowStore, ShadowObserver]],
        spend: SpendStore,
        metrics: Metrics,
        clock: Clock,
        chance: random.Random,
        checks: SemanticChecks,
    ) -> None:
        self._backends = backends
        self._admission = admission
        self._make = make
        self._spend = spend
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self.checks = checks
        self._policy: Policy | None = None
        self._store: ShadowStore | None = None
        self._observer: ShadowObserver | None = None
        self._waiting: deque[ShadowQuestion] = deque()
        self._wake = asyncio.Event()
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._unusable = ""

    @property
    def waiting(self) -> int:
        """Answers that wait for their shadow request, the one that is running included."""
        return len(self._waiting) + (self._scope is not None)

    @property
    def problems(self) -> tuple[str, ...]:
        aside = {} if self._observer is None else self._observer.set_aside
        stats = self.stats()
        return (self._unusable, *aside.values(), "" if stats is None else stats.problem)

    def stats(self) -> SqliteStats | None:
        """Of the file; None without one."""
        return None if self._store is None else self._store.stats()

    def gauges(self) -> Iterator[Gauge]:
        """Yield what the policy's shadow requests cost today, and how well the calibrated signals do."""
        if self._store is None or self._observer is None:
            return
        yield Gauge(
            "causeway_edge_shadow_usd_today", "Cost of shadow requests since local midnight.", self._store.usd_today
        )
        yield from self._observer.gauges()

    def use(self, policy: Policy) -> None:
        """Follow another policy; what waits under the former one is dropped."""
        self._drop_waiting()
        self._policy, self._unusable = policy, ""
        self._follow_policy(policy)
        self.checks.use(policy, self._store)

    def _follow_policy(self, policy: Policy) -> None:
        if policy.shadow is None:
            return
        if self._store is None:
            try:
                self._store, self._observer = self._make()
            except (ArtifactError, ImportError) as error:
                self._unusable = f"no shadow requests are sent: {error}"
                log.warning(self._unusable)
                return
            self._wake.set()
        elif self._observer is not None:
            self._observer.look(policy.shadow.max_drift)

    def tap(self, generation: Generation, reply: Reply[AnswerHead]) -> ShadowTap | None:
        """Return the reply of an answer that a shadow request will follow; None for any other answer."""
        decision, request = generation.decision, generation.request
        if decision is None or decision.shadow is None or self._observer is None or self._stopped:
            return None
        if generation.on_device or generation.job is not None or request.echo or request.suffix is not None:
            return None
        prompt = prompt_text(request)
        if prompt is None or len(prompt) > MOST_CHARACTERS or self._chance.random() >= decision.shadow.share:
            return None
        return ShadowTap(generation, reply, prompt)

    def put(self, tap: ShadowTap) -> str:
        """Queue the shadow request of an answer that is complete; return the name of its target, or ""."""
        generation, answered = tap.generation, tap.generation.target
        assert generation.decision is not None
        other = None if answered is None else other_target(generation.decision.attempts, answered)
        if answered is None or other is None or not tap.answer.complete or generation.on_device or generation.degraded:
            return ""
        if len(self._waiting) >= _MOST_WAITING or self._stopped or generation.policy is not self._policy:
            self._count("dropped", other)
            return ""
        now = self._clock.monotonic()
        self._waiting.append(ShadowQuestion(generation, tap.prompt, tap.answer, answered, other, now))
        self._wake.set()
        return other.name

    def stop(self) -> None:
        """Drop what waits and cancel what runs: the daemon drains."""
        self._stopped = True
        self._drop_waiting()
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        """Write what is queued. Blocks: call it in a thread."""
        if self._store is not None:
            self._store.close()

    async def run(self) -> None:
        """Send shadow requests, one after the other, until cancelled."""
        started = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not started and self._store is not None and self._observer is not None:
                started = True
                self._observer.add(await self._store.start(self._observer.window), self._max_drift)
                self.checks.restore(self._store)
            while self._waiting:
                await self._run_next(self._waiting.popleft())

    async def _run_next(self, question: ShadowQuestion) -> None:
        result: Result = "interrupted"
        with anyio.CancelScope() as self._scope:
            try:
                result = await self._follow(question)
            except (CausewayError, TimeoutError) as error:
                log.debug("a shadow request to %s failed: %s", question.other.name, type(error).__name__)
                result = "failed"
            except Exception as failure:
                log.error("a shadow request failed unexpectedly: %s", redacted(failure))
                result = "failed"
        self._scope = None
        self._count(result, question.other)

    async def _follow(self, question: ShadowQuestion) -> Result:
        """Ask the other side, compare, and keep what it teaches."""
        on_device = question.other.at == "edge"
        for _ in range(_TRIES if on_device else 1):
            if on_device:
                await self._admission.idle()
            elif not self._admission.has_room:
                return "dropped"
            if self._clock.monotonic() - question.since > _LONGEST_WAIT_S:
                return "dropped"
            if not self._is_affordable(question):
                return "over_budget"
            with self._admission.spare() if on_device else nullcontext():
                text = await self._ask(question)
                return self._compare(question, text) if text.complete and not text.degraded else "failed"
        return "interrupted"

    async def _ask(self, question: ShadowQuestion) -> ShadowText:
        """Return the other side's answer. Whatever ends this, what it may have cost is charged."""
        text, usd = ShadowText(), question.most_usd
        chunks = self._backends[question.other.at].generate(self._call(question, text))
        try:
            async with asyncio.timeout(_WHOLE_S):
                async for chunk in chunks:
                    text.add(chunk)
            if text.usage_tokens:
                usd = text.usage_tokens / 1000.0 * question.other.usd_per_1k_tokens
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
        from ..signals.shadow import ComparedAnswers  # imported only where a policy has shadow requests

        assert self._observer is not None
        assert self._store is not None
        on_device = question.answered.at == "edge"
        targets, texts = (question.answered, question.other), (question.answer, text)
        (small_target, large_target), (small, large) = (targets, texts) if on_device else (targets[::-1], texts[::-1])
        answer = self._observer.compare(
            ComparedAnswers(
                route=question.route,
                prompt=question.prompt,
                small_model=small_target.model,
                large_model=large_target.model,
                small=small.text,
                large=large.text,
                # The client's answer has the calibrated one.
                confidence=question.generation.raw_confidence if on_device else small.confidence,
                ended=small.ended,
                after=question.after,
            )
        )
        self._store.add(answer)
        self._observer.add([answer], self._max_drift)
        return "agreed" if answer.agreed else "disagreed"

    def _is_affordable(self, question: ShadowQuestion) -> bool:
        shadow = None if self._policy is None else self._policy.shadow
        if shadow is None or self._store is None:
            return False
        return question.most_usd == 0.0 or self._store.usd_today + question.most_usd <= shadow.usd_per_day

    def _charge(self, usd: float, target: Target) -> None:
        if usd > 0.0 and self._store is not None:
            self._store.charge(usd)
            self._spend.add(usd)
            self._metrics.shadow_paid(target.name, usd)

    def _count(self, result: Result, target: Target) -> None:
        self._metrics.shadow_finished(target.name, result)

    def _drop_waiting(self) -> None:
        while self._waiting:
            self._count("dropped", self._waiting.popleft().other)

    @property
    def _max_drift(self) -> float:
        shadow = None if self._policy is None else self._policy.shadow
        return 1.0 if shadow is None else shadow.max_drift
