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
from router.tools import tool_schema
from router.types import Chunk, Request

from .admission import Admission
from .call import Call, Head, Piece, head_of
from .choices import Answer
from .climbing import Fell, Generates, Go
from .ladder.callers import place_of
from .ladder.continuing import PARAM, Continuing, SoFar, continued, is_resumable
from .ladder.cutting import Scissors
from .ladder.footing import Stress
from .ladder.ladder import Ladder
from .ladder.metrics import Kind, LadderMetrics
from .ladder.plan import Asked, Rung
from .parameters import SamplingParameters, from_request
from .pool.prefix import key_of
from .tensors import Ask
from .tiers import Tier

__all__ = ["Call", "Kept", "Lane", "Service", "refuse_unable"]


class Lane(msgspec.Struct, frozen=True):
    """A tier, its door, and what is behind it."""

    tier: Tier
    admission: Admission
    dispatch: Generates


class Kept(Protocol):
    """An old answer: cache.answer.Kept."""

    @property
    def head(self) -> Head: ...

    @property
    def chunks(self) -> tuple[Chunk, ...]: ...

    @property
    def age_s(self) -> float: ...


Stale = Callable[[Request, str], Awaitable[Kept | None]]


async def nothing_stale(request: Request, tenant: str) -> Kept | None:
    return None


class Service:
    """`lanes` by the tier's name. `stale` finds an old answer to a tenant's question; it never raises."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        ladder: Ladder,
        *,
        continuing: Continuing | None = None,
        stale: Stale = nothing_stale,
        metrics: LadderMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lanes = lanes
        self._ladder = ladder
        self._continuing = continuing
        self._stale = stale
        self._metrics = metrics
        self._clock = clock

    async def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """A Head, then the answer piece by piece. Raises CausewayError; closing it stops the work in Triton and frees
        the place."""
        refuse_unable(call.request)
        before = self._before(call)
        key = key_of(call.request)
        asked = self._asked(call, before, key)
        failed: dict[str, Stress] = {}
        falls: list[Fell] = []
        for rung in self._ladder.rungs(asked, call.priority):
            lane = self._lanes[rung.tier]
            scissors = self._scissors(call, rung, lane.tier, before)
            go = Go(self._ladder, rung, lane.admission, lane.dispatch, self._clock)
            async with AsyncExitStack() as held:
                try:
                    asks = partial(self._asks, call, lane.tier, before, scissors)
                    number, delta = await go.begin(held, call, asks, key)
                except Fell as fell:  # (2)
                    failed[rung.tier] = fell.stress
                    falls.append(fell)
                    continue
                yield self._head(call, rung, failed, before, scissors)  # (1)
                said = Answer(call.request, max(1, len(call.request.prompts)))
                for chunk in said.echo() if before is None else ():
                    yield chunk
                for chunk in said.take(number, delta):
                    yield chunk if scissors is None else scissors.seen(chunk)
                # Two loops, for one prompt is what nearly everybody sends: nothing is done twice for a token.
                if go.only is not None:
                    async for delta in go.only:
                        for chunk in said.take(0, delta):
                            yield chunk if scissors is None else scissors.seen(chunk)
                else:
                    async for number, delta in go.many:
                        for chunk in said.take(number, delta):
                            yield chunk
                go.used(said.tokens)
                yield said.end()
                return
        kept = None if call.stays or before else await self._stale(call.request, call.tenant)
        if kept is None:
            raise refusal_of(falls)  # (5)
        yield self._old(call, kept, failed)  # (4)
        for chunk in kept.chunks:
            yield chunk

    def _before(self, call: Call) -> SoFar | None:
        """What was said before the cut, where the rest of an answer is asked for. Raises CausewayError."""
        if not call.request.resume:
            return None
        if self._continuing is None:
            raise InvalidRequest(f"this gateway continues no answers: leave `{PARAM}` away", param=PARAM)
        return self._continuing.open(call.tenant, _question(call))

    def _asked(self, call: Call, before: SoFar | None, key: bytes) -> Asked:
        # The rest of an answer is best said by who said its beginning.
        tier = before.tier if before and before.tier in self._lanes else call.tier.name
        resumable = self._continuing is not None and is_resumable(call.request)
        place = place_of(call.tenant, call.request.wishes.client, key)
        return Asked(tier, call.deadline - self._clock(), place, call.stays, resumable)

    def _scissors(self, call: Call, rung: Rung, tier: Tier, before: SoFar | None) -> Scissors | None:
        """None: the answer may be as long as was asked for."""
        limit = self._ladder.config.partial_tokens
        if not rung.cut or self._continuing is None or _left_tokens(call.request, tier, before) <= limit:
            return None
        return Scissors(self._continuing, call.tenant, _question(call), tier.name, limit, before)

    def _asks(self, call: Call, tier: Tier, before: SoFar | None, scissors: Scissors | None) -> list[Ask]:
        """Raises InvalidRequest."""
        parameters = from_request(
            call.request,
            max_tokens=tier.max_tokens,
            schema=tool_schema(call.request),
            guided_key=tier.config.guided,
            temperature=tier.wording.temperature,
            utterance=tier.utterance(call.request),
            said="" if before is None else before.text,
        )
        prompts: Sequence[str] = tier.prompts(call.request)
        if before is not None:
            prompts = [continued(tier, prompt, before.text) for prompt in prompts]
        if before is not None or scissors is not None:
            limit = scissors.limit if scissors else _left_tokens(call.request, tier, before)
            parameters = msgspec.structs.replace(parameters, max_tokens=limit)
        return [
            Ask(
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
        self, call: Call, rung: Rung, failed: Mapping[str, Stress], before: SoFar | None, scissors: Scissors | None
    ) -> Head:
        fell, why = rung.tier != call.tier.name, rung.why(failed)
        if fell and not rung.above:
            why = "continued"  # where the first part came from
        if self._metrics is not None:
            self._metrics.answered(call.tier.name, rung.tier, rung.nearest(failed))
            kinds: tuple[tuple[Kind, bool], ...] = (
                ("tier", fell),
                ("partial", scissors is not None),
                ("continued", before is not None),
            )
            self._metrics.degraded(*(kind for kind, holds in kinds if holds))
        if scissors is not None:
            why += "; cut"
        return head_of(rung.tier, why, degraded=fell or scissors is not None, keep=before is None)

    def _old(self, call: Call, kept: Kept, failed: Mapping[str, Stress]) -> Head:
        if self._metrics is not None:
            self._metrics.degraded("stale")
        why = "; ".join([*(f"{tier}={stress}" for tier, stress in failed.items()), "stale"])
        return head_of(kept.head.tier or call.tier.name, why, degraded=True, stale_s=kept.age_s)


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


def refusal_of(falls: Sequence[Fell]) -> CausewayError:
    """Of several tiers: that of one that only had no room, if there is one, with the soonest of all their times."""
    able = [fell for fell in falls if fell.stress != "unable"] or falls
    found = next((fell for fell in able if fell.stress == "saturated"), able[0]).error
    waits = [fell.error.retry_after_s for fell in falls if fell.error.retry_after_s is not None]
    found.retry_after_s = min(waits, default=None)
    return found


def _question(call: Call) -> Request:
    """By the tier's own name: whoever shares an answer may have asked under another one."""
    return msgspec.structs.replace(call.request, model=call.tier.name)


def _left_tokens(request: Request, tier: Tier, before: SoFar | None) -> int:
    """How many tokens the answer may still have."""
    return max(1, (request.max_tokens or tier.max_tokens) - (before.tokens if before else 0))


def _for_prompt(parameters: SamplingParameters, offset: int) -> SamplingParameters:
    """Each prompt of a list draws anew, also under one seed."""
    if parameters.seed is None or not offset:
        return parameters
    return msgspec.structs.replace(parameters, seed=parameters.seed + offset)
