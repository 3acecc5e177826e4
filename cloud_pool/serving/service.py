"""One request on the ladder of tiers: Request → rungs → prompts → Triton → Chunks. The gateway's hops after parsing:

ladder      which tiers to try, in order, each with its why     ladder.ladder.Ladder
prompt      the chat template of the tier's model               tiers.Tier.prompts
admission   a place in the tier, or a bounded wait              admission.Admission
dispatch    one call for each prompt, n sequences in each       dispatch.dispatch.Dispatch.generate
Chunks      text → text and tool calls; usage at the end        choices.Answer

1. a rung has its first delta: a Head says which tier answers and why, and from here on nothing else is tried
2. before that it refused, failed or was too slow, for a reason of its own: the next rung, within the same deadline
3. or for a reason of the request's: that is the answer
4. no rung is left: an old answer to the same question, if there is one
5. else the refusal, with the soonest time at which one of the tiers may have room
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

import msgspec

from router.errors import CausewayError, InvalidRequest, UnsupportedFeature
from router.tool_calls.schema import tool_schema
from router.types import Chunk, Request

from ..admission import AdmissionController
from ..balancing.prefix_affinity import prefix_key
from ..config.tiers import Tier
from ..degradation.caller_position import caller_position
from ..degradation.continue_token import PARAM, ContinueTokens, PartialAnswer, continued, is_resumable
from ..degradation.fallback import TierFallback
from ..degradation.fallback_plan import FallbackRequest, FallbackStep
from ..degradation.metrics import DegradationMetrics, Kind
from ..degradation.tier_health import Stress
from ..degradation.truncation import Truncator
from ..upstreams.triton.sampling_parameters import SamplingParameters, from_request
from ..upstreams.triton.tensors import InferenceRequest
from .answer_builder import AnswerBuilder
from .request_context import AnswerHead, Piece, RequestContext, answer_head
from .tier_attempt import TierAttempt, TierDispatch, TierFailed

__all__ = ["RequestContext", "Service", "StaleAnswer", "TierRuntime", "refuse_unable"]


class TierRuntime(msgspec.Struct, frozen=True):
    """A tier, its door, and what is behind it."""

    tier: Tier
    admission: AdmissionController
    dispatch: TierDispatch


class StaleAnswer(Protocol):
    """An old answer: cache.answer.Kept."""

    @property
    def head(self) -> AnswerHead: ...

    @property
    def chunks(self) -> tuple[Chunk, ...]: ...

    @property
    def age_s(self) -> float: ...


Stale = Callable[[Request, str], Awaitable[StaleAnswer | None]]


async def nothing_stale(request: Request, tenant: str) -> StaleAnswer | None:
    return None


class Service:
    """`lanes` by the tier's name. `stale` finds an old answer to a tenant's question; it never raises."""

    def __init__(
        self,
        lanes: Mapping[str, TierRuntime],
        ladder: TierFallback,
        *,
        continue_tokens: ContinueTokens | None = None,
        stale: Stale = nothing_stale,
        metrics: DegradationMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lanes = lanes
        self._ladder = ladder
        self._continuing = continue_tokens
        self._stale = stale
        self._metrics = metrics
        self._clock = clock

    async def answer(self, call: RequestContext) -> AsyncGenerator[Piece, None]:
        """A Head, then the answer piece by piece. Raises CausewayError; closing it stops the work in Triton and frees
        the place."""
        refuse_unable(call.request)
        before = self._before(call)
        key = prefix_key(call.request)
        asked = self._asked(call, before, key)
        failed: dict[str, Stress] = {}
        tier_failures: list[TierFailed] = []
        for fallback_step in self._ladder.fallback_steps(asked, call.priority):
            lane = self._lanes[fallback_step.tier]
            truncator = self._scissors(call, fallback_step, lane.tier, before)
            tier_attempt = TierAttempt(self._ladder, fallback_step, lane.admission, lane.dispatch, self._clock)
            async with AsyncExitStack() as held:
                try:
                    asks = partial(self._asks, call, lane.tier, before, truncator)
                    number, delta = await tier_attempt.begin(held, call, asks, key)
                except TierFailed as tier_failure:  # (2)
                    failed[fallback_step.tier] = tier_failure.stress
                    tier_failures.append(tier_failure)
                    continue
                yield self._head(call, fallback_step, failed, before, truncator)  # (1)
                said = AnswerBuilder(call.request, max(1, len(call.request.prompts)))
                for chunk in said.echo() if before is None else ():
                    yield chunk
                for chunk in said.take(number, delta):
                    yield chunk if truncator is None else truncator.seen(chunk)
                # Two loops, for one prompt is what nearly everybody sends: nothing is done twice for a token.
                if tier_attempt.only is not None:
                    async for delta in tier_attempt.only:
                        for chunk in said.take(0, delta):
                            yield chunk if truncator is None else truncator.seen(chunk)
                else:
                    async for number, delta in tier_attempt.many:
                        for chunk in said.take(number, delta):
                            yield chunk
                tier_attempt.used(said.tokens)
                yield said.end()
                return
        kept = None if call.stays or before else await self._stale(call.request, call.tenant)
        if kept is None:
            raise refusal_of(tier_failures)  # (5)
        yield self._old(call, kept, failed)  # (4)
        for chunk in kept.chunks:
            yield chunk

    def _before(self, call: RequestContext) -> PartialAnswer | None:
        """What was said before the cut, where the rest of an answer is asked for. Raises CausewayError."""
        if not call.request.resume:
            return None
        if self._continuing is None:
            raise InvalidRequest(f"this gateway continues no answers: leave `{PARAM}` away", param=PARAM)
        return self._continuing.open(call.tenant, _question(call))

    def _asked(self, call: RequestContext, before: PartialAnswer | None, key: bytes) -> FallbackRequest:
        # The rest of an answer is best said by who said its beginning.
        tier = before.tier if before and before.tier in self._lanes else call.tier.name
        resumable = self._continuing is not None and is_resumable(call.request)
        place = caller_position(call.tenant, call.request.hints.client, key)
        return FallbackRequest(tier, call.deadline - self._clock(), place, call.stays, resumable)

    def _scissors(
        self, call: RequestContext, fallback_step: FallbackStep, tier: Tier, before: PartialAnswer | None
    ) -> Truncator | None:
        """None: the answer may be as long as was asked for."""
        limit = self._ladder.config.truncate_to_tokens
        if not fallback_step.cut or self._continuing is None or _left_tokens(call.request, tier, before) <= limit:
            return None
        return Truncator(self._continuing, call.tenant, _question(call), tier.name, limit, before)

    def _asks(
        self, call: RequestContext, tier: Tier, before: PartialAnswer | None, truncator: Truncator | None
    ) -> list[InferenceRequest]:
        """Raises InvalidRequest."""
        parameters = from_request(
            call.request,
            max_tokens=tier.max_tokens,
            schema=tool_schema(call.request),
            guided_key=tier.config.guided_key,
            temperature=tier.chat_format.temperature,
            copy_source=tier.copy_source(call.request),
            answer_prefix="" if before is None else before.text,
        )
        prompts: Sequence[str] = tier.prompts(call.request)
        if before is not None:
            prompts = [continued(tier, prompt, before.text) for prompt in prompts]
        if before is not None or truncator is not None:
            limit = truncator.limit if truncator else _left_tokens(call.request, tier, before)
            parameters = msgspec.structs.replace(parameters, max_tokens=limit)
        return [
            InferenceRequest(
                model=tier.model,
                prompt=prompt,
                parameters=_for_prompt(parameters, at * call.request.n),
                deadline=call.deadline,
                request_id=call.id,
                traceparent=call.traceparent,
                trace=call.trace,
            )
            for at, prompt in enumerate(prompts)
        ]

    def _head(
        self,
        call: RequestContext,
        fallback_step: FallbackStep,
        failed: Mapping[str, Stress],
        before: PartialAnswer | None,
        truncator: Truncator | None,
    ) -> AnswerHead:
        tier_failure, why = fallback_step.tier != call.tier.name, fallback_step.why(failed)
        if tier_failure and not fallback_step.above:
            why = "continued"  # where the first part came from
        if self._metrics is not None:
            self._metrics.answered(call.tier.name, fallback_step.tier, fallback_step.nearest(failed))
            kinds: tuple[tuple[Kind, bool], ...] = (
                ("tier", tier_failure),
                ("partial", truncator is not None),
                ("continued", before is not None),
            )
            self._metrics.degraded(*(kind for kind, holds in kinds if holds))
        if truncator is not None:
            why += "; truncated"
        return answer_head(fallback_step.tier, why, degraded=tier_failure or truncator is not None, keep=before is None)

    def _old(self, call: RequestContext, kept: StaleAnswer, failed: Mapping[str, Stress]) -> AnswerHead:
        if self._metrics is not None:
            self._metrics.degraded("stale")
        why = "; ".join([*(f"{tier}={stress}" for tier, stress in failed.items()), "stale"])
        return answer_head(kept.head.tier or call.tier.name, why, degraded=True, stale_s=kept.age_s)


def refuse_unable(request: Request) -> None:
    """What the tensors cannot say. Raises UnsupportedFeature."""
    if request.kind == "embedding":
        raise UnsupportedFeature("tiers generate text; embeddings are made on the device", param="model")
    if request.suffix is not None:
        raise UnsupportedFeature("`suffix`: the tiers do not fill in the middle. Remove it.", param="suffix")
    if request.echo and request.logprobs is not None:
        raise UnsupportedFeature(
            "`echo` with `logprobs`: the tiers give none for the prompt. Remove one.", param="echo"
        )


def refusal_of(tier_failures: Sequence[TierFailed]) -> CausewayError:
    """Of several tiers: that of one that only had no room, if there is one, with the soonest of all their times."""
    able = [tier_failure for tier_failure in tier_failures if tier_failure.stress != "unable"] or tier_failures
    found = next((tier_failure for tier_failure in able if tier_failure.stress == "saturated"), able[0]).error
    waits = [
        tier_failure.error.retry_after_s
        for tier_failure in tier_failures
        if tier_failure.error.retry_after_s is not None
    ]
    found.retry_after_s = min(waits, default=None)
    return found


def _question(call: RequestContext) -> Request:
    """By the tier's own name: whoever shares an answer may have asked under another one."""
    return msgspec.structs.replace(call.request, model=call.tier.name)


def _left_tokens(request: Request, tier: Tier, before: PartialAnswer | None) -> int:
    """How many tokens the answer may still have."""
    return max(1, (request.max_tokens or tier.max_tokens) - (before.tokens if before else 0))


def _for_prompt(parameters: SamplingParameters, offset: int) -> SamplingParameters:
    """Each prompt of a list draws anew, also under one seed."""
    if parameters.seed is None or not offset:
        return parameters
    return msgspec.structs.replace(parameters, seed=parameters.seed + offset)
