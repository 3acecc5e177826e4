"""Decision → Chunks: the attempts of one work, one after the other, until one answers.

The order, holding back, and when to switch are `router.decision.sequence` and `router.decision.attempt`; here are
the awaits, bounded:

1. the first token has to come within the target's time for it, the answer within the target's whole time: else the
   target timed out, and the next one may try
2. all of it within the request's deadline: else nobody tries any more
3. closing what a target has begun takes at most `_CLOSE_S`, whoever hangs

Work that is bound to the device never reaches a cloud backend, whatever the decision says.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Mapping

import anyio
import msgspec

from router.decision.attempts import Attempt, AttemptState, no_route
from router.errors import (
    BackendError,
    CausewayError,
    ClientGone,
    CloudTimeout,
    CloudUnreachable,
    DeadlineExceeded,
    EngineTimeout,
    EngineUnavailable,
    NoRoute,
)
from router.types import Chunk, Location, Target

from ..backends.backend import Backend, BackendRequest
from .generation import Generation, policy_label
from .reply import Piece, Sink

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
_GRACE_S = 0.05  # a backend keeps the bounds by itself, and knows better what broke; here one is stopped that does not
_TIMER_STEP_S = 0.005  # timers may fire this much early


class Timeouts(msgspec.Struct, frozen=True):
    """How long a target may take where the policy says nothing about it, in seconds; None: the request's deadline."""

    first_token_s: float | None = None
    whole_s: float | None = None


# A call, a chunk of its answer, `edge.quality` if known → the chunk with its confidence as a probability.
ConfidenceCalibrator = Callable[[BackendRequest, Chunk, float | None], Chunk]


class AttemptRunner:
    """`weigh` None: a handoff compares what the engine reports."""

    def __init__(
        self,
        backends: Mapping[Location, Backend],
        patience: Mapping[Location, Timeouts],
        weigh: ConfidenceCalibrator | None = None,
    ) -> None:
        self._backends = backends
        self._patience = patience
        self._weigh = weigh

    async def run(self, work: Generation, sink: Sink) -> None:
        """Returns when `sink` has the whole answer. Raises what the client is to be told."""
        assert work.course is not None
        assert work.decision is not None
        while (attempt := work.course.next_attempt()) is not None:
            try:
                await self._try(work, attempt, sink)
                return
            except asyncio.CancelledError:
                _fail(attempt, ClientGone("the caller left"))
                raise
            except Exception as failure:
                error = _known(failure, attempt.plan.target)
                _fail(attempt, error)
                if work.course.next_step(error) == "raise":
                    raise work.course.final_error(error) from failure
        raise no_route(work.decision)

    async def _try(self, work: Generation, attempt: Attempt, sink: Sink) -> None:
        target = attempt.plan.target
        assert work.decision is not None
        if work.decision.on_device and target.at != "edge":
            raise NoRoute(f"this request may not leave the device, and {target.name} is in the cloud")
        backend = self._backends.get(target.at)
        if backend is None:
            raise _nobody(target)
        now = _now()
        attempt.start(now)
        limit, first = self._limits(work, attempt, now)
        call = BackendRequest(
            id=work.id,
            request=work.request,
            target=target,
            deadline=limit,
            first_token_by=first,
            confidence_tokens=attempt.plan.handoff.after_tokens if attempt.plan.handoff is not None else 0,
            traceparent=work.onward,
            policy=policy_label(work.policy),
            keep=work.key is not None,
        )
        work.heard = call.heard
        try:
            if work.request.kind == "embedding":
                await _embed(work, attempt, backend, call, sink)
            else:
                await self._generate(work, attempt, backend, call, sink)
        except (TimeoutError, DeadlineExceeded, CloudTimeout) as error:
            raise _late(work, attempt, error) from error

    async def _generate(
        self, work: Generation, attempt: Attempt, backend: Backend, call: BackendRequest, sink: Sink
    ) -> None:
        """Raises TimeoutError (1) (2), or what the backend, the attempt or the sink raises."""
        chunks = backend.generate(call)
        waiting, ended = True, False
        try:
            async with asyncio.timeout_at(min(call.first_token_by, call.deadline) + _GRACE_S) as bound:
                async for chunk in chunks:
                    if waiting:
                        waiting = False
                        bound.reschedule(call.deadline + _GRACE_S)
                    await _deliver(work, attempt.receive(self._weighed(work, call, chunk), _now()), sink)
                ended = True
                await _deliver(work, attempt.finish(_now()), sink)
        finally:
            if not ended:
                await _close(chunks)

    def _weighed(self, work: Generation, call: BackendRequest, chunk: Chunk) -> Chunk:
        if chunk.confidence is None or self._weigh is None:
            return chunk
        return self._weigh(call, chunk, work.estimates.quality)

    def _limits(self, work: Generation, attempt: Attempt, now: float) -> tuple[float, float]:
        """When the whole answer, and when its first token, has to be there."""
        target = attempt.plan.target
        patience = self._patience.get(target.at, Timeouts())
        whole_s = patience.whole_s if target.timeout_s is None else target.timeout_s
        first_s = patience.first_token_s if target.first_token_timeout_s is None else target.first_token_timeout_s
        limit = work.deadline if whole_s is None else min(work.deadline, now + whole_s)
        if first_s is None or not _streams(work, attempt):
            return limit, limit
        return limit, min(limit, now + first_s)


async def _embed(work: Generation, attempt: Attempt, backend: Backend, call: BackendRequest, sink: Sink) -> None:
    async with asyncio.timeout_at(call.deadline + _GRACE_S):
        embeddings = await backend.embed(call)
        attempt.complete(_now())
        await _deliver(work, (embeddings,), sink)


async def _deliver(work: Generation, pieces: tuple[Piece, ...], sink: Sink) -> None:
    for piece in pieces:
        if not work.committed:
            work.committed = True
            await sink.commit(work.head())
        if piece.usage is not None:
            work.usage = piece.usage
        await sink.send(piece)


async def _close(chunks: AsyncIterator[Chunk]) -> None:
    """(3) Stop the target's work."""
    close = getattr(chunks, "aclose", None)
    if close is None:
        return
    with anyio.CancelScope(deadline=_now() + _CLOSE_S, shield=True):
        await close()


def _streams(work: Generation, attempt: Attempt) -> bool:
    """Whether the target tells its first token before the whole answer is there."""
    return work.request.stream or attempt.plan.handoff is not None or attempt.plan.target.at == "edge"


def _late(work: Generation, attempt: Attempt, error: Exception) -> CausewayError:
    """(2) goes before (1): with no time left there is no point in another target."""
    target = attempt.plan.target
    if _now() >= work.deadline - _TIMER_STEP_S:
        return DeadlineExceeded(f"the deadline passed while {target.name} was answering")
    if isinstance(error, CloudTimeout):
        return error
    timeout = EngineTimeout if target.at == "edge" else CloudTimeout
    if attempt.tokens == 0:
        return timeout(f"{target.name} gave no first token in its time", phase="first_token")
    return timeout(f"{target.name} did not finish in its time", phase="stream")


def _nobody(target: Target) -> BackendError:
    if target.at == "edge":
        return EngineUnavailable(f"{target.name}: this server runs no engine", phase="connect")
    return CloudUnreachable(f"{target.name}: this server has no cloud", phase="connect")


def _known(failure: Exception, target: Target) -> CausewayError:
    """A backend that breaks its promise has failed like any other. Its words may quote the ask: they are not kept."""
    if isinstance(failure, CausewayError):
        return failure
    log.error("%s broke unexpectedly: %s", target.name, where(failure))
    return BackendError(f"{target.name} failed unexpectedly ({type(failure).__name__})")


def _fail(attempt: Attempt, error: CausewayError) -> None:
    # The attempt may be over when the client leaves: its last piece was on the way.
    if attempt.state is not AttemptState.DONE:
        attempt.fail(error, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()


def where(error: BaseException) -> str:
    """An exception as a log may have it: its type and place, never its message, which may quote the ask."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{place}"
