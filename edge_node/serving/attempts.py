"""Decision → Chunks: run the attempts of one generation, one after the other, until a target answers.

The order, the hold-back for a handoff and the rule for the next attempt are pure (`router.decision.attempts`); this
module awaits, and bounds every wait:

1. first token and complete answer each have the target's own timeout; after it the next target may answer
2. everything ends at the request's deadline; after it no target is tried
3. closing an abandoned backend stream takes at most `_CLOSE_S`

A request, or a part of one, that is bound to the device never reaches a cloud backend, whatever the decision says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from router.decision.abilities import no_route
from router.decision.attempts import Attempt, AttemptState, final_error
from router.errors import (
    BackendError,
    BreakerOpen,
    CausewayError,
    ClientGone,
    CloudTimeout,
    DeadlineExceeded,
    EngineTimeout,
    EngineUnavailable,
    NoRoute,
    TargetNotConfigured,
)
from router.policy.signals import modalities
from router.serving.logs import redacted
from router.serving.reply import AnswerHead, Piece, Reply
from router.types import AttemptPlan, Chunk, Location, Request, Target

from ..backends.backend import Backend, BackendRequest
from .generation import Generation, policy_label

if TYPE_CHECKING:
    from models.llama_cpp.protocol import SoftTokens

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
_GRACE_S = 0.05  # backends enforce their own timeouts and report the phase; this is the backstop
_TIMER_STEP_S = 0.005  # timers may fire this much early


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds that a target may take where the policy sets no timeout; None: until the request's deadline."""

    first_token_s: float | None = None
    whole_s: float | None = None


# A backend request, a chunk of its answer, `edge.quality` if known, the confidence of the transcript if the request was
# spoken → the chunk with its confidence as a probability.
ConfidenceCalibrator = Callable[[BackendRequest, Chunk, float | None, float | None], Chunk]


class Preparation(Protocol):
    """Turns parts of a request into what the target of an attempt takes; see `PartEncoders.prepare`."""

    async def prepare(self, generation: Generation, plan: AttemptPlan) -> tuple[Request, tuple[SoftTokens, ...]]: ...


class AttemptRunner:
    """Runs attempts on backends.

    Args:
        calibrate: None: a handoff compares the confidence that the engine reports.
        encoders: turn parts of requests into text or soft tokens for targets that cannot take them; None: this box has
            none.
    """

    def __init__(
        self,
        backends: Mapping[Location, Backend],
        timeouts: Mapping[Location, Timeouts],
        calibrate: ConfidenceCalibrator | None = None,
        encoders: Preparation | None = None,
    ) -> None:
        self._backends = backends
        self._timeouts = timeouts
        self._calibrate = calibrate
        self._encoders = encoders

    async def run(self, generation: Generation, reply: Reply[AnswerHead]) -> None:
        """Return when `reply` has the complete answer. Raises CausewayError: the error for the client."""
        assert generation.sequence is not None
        assert generation.decision is not None
        if generation.semantic_check is not None:
            _refuse_skipped(generation)
        while (attempt := generation.sequence.next_attempt()) is not None:
            try:
                await self._run_attempt(generation, attempt, reply)
                return
            except asyncio.CancelledError:
                _fail(attempt, ClientGone("the client disconnected"))
                raise
            except Exception as failure:
                error = _as_causeway_error(failure, attempt.plan.target)
                _fail(attempt, error)
                gives_up = generation.semantic_check is not None and attempt.failed
                if gives_up or generation.sequence.next_step(error) == "raise":
                    raise final_error(generation.sequence.attempts, error) from failure
        raise no_route(generation.decision)

    async def _run_attempt(self, generation: Generation, attempt: Attempt, reply: Reply[AnswerHead]) -> None:
        target = attempt.plan.target
        assert generation.decision is not None
        if generation.decision.on_device and target.at != "edge":
            raise NoRoute(f"this request may not leave the device, and {target.name} is in the cloud")
        backend = self._backends.get(target.at)
        if backend is None:
            raise _no_backend(target)
        request = generation.request
        soft: tuple[SoftTokens, ...] = ()
        if (attempt.plan.facts or attempt.plan.soft) and self._encoders is not None:
            request, soft = await self._encoders.prepare(generation, attempt.plan)
        if generation.decision.parts_on_device and target.at != "edge" and modalities(request) != ["text"]:
            raise NoRoute(f"parts of this request may not leave the device, and {target.name} is in the cloud")
        now = _now()
        attempt.start(now)
        deadline, first_token_by = self._deadlines(generation, attempt, now)
        call = BackendRequest(
            id=generation.id,
            request=with_temperature(request, target),
            target=target,
            deadline=deadline,
            first_token_by=first_token_by,
            confidence_tokens=attempt.plan.handoff.after_tokens if attempt.plan.handoff is not None else 0,
            traceparent=generation.outgoing_traceparent,
            policy=policy_label(generation.policy),
            cacheable=generation.cache_key is not None,
            durable=not generation.on_device,
            report_upstream=generation.set_upstream,
            report_loosened=generation.set_held,
            job=generation.job,
            soft=soft,
        )
        generation.upstream = generation.held = None
        try:
            if generation.request.kind == "embedding":
                await _embed(generation, attempt, backend, call, reply)
            else:
                stream = self._stream(generation, attempt, backend, call, reply)
                # In a task of its own a token resumes 5 coroutines, not the 17 from the connection down to here.
                await (asyncio.create_task(stream) if generation.request.stream else stream)
        except (TimeoutError, DeadlineExceeded, CloudTimeout) as error:
            raise _timeout_error(generation, attempt, error) from error

    async def _stream(
        self, generation: Generation, attempt: Attempt, backend: Backend, call: BackendRequest, reply: Reply[AnswerHead]
    ) -> None:
        """Raises TimeoutError (1) (2), or the error of the backend, the attempt or the reply."""
        chunks = backend.generate(call)
        first, ended = True, False
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(min(call.first_token_by, call.deadline) + _GRACE_S) as timeout:
                async for chunk in chunks:
                    if first:
                        first = False
                        if generation.semantic_check is not None:
                            _refuse_degraded(generation)
                        timeout.reschedule(call.deadline + _GRACE_S)
                    if chunk.confidence is not None and self._calibrate is not None:
                        generation.raw_confidence = chunk.confidence
                        quality, spoken = generation.estimates.quality, generation.transcript_confidence
                        chunk = self._calibrate(call, chunk, quality, spoken)  # noqa: PLW2901
                    for piece in attempt.receive(chunk, now()):
                        if not generation.committed:
                            await _commit(generation, reply)
                        if (slow := _send(generation, piece, reply)) is not None:
                            await slow
                ended = True
        except ClientGone:
            raise
        except Exception as failure:
            if not attempt.whole:
                raise
            # Nothing that happens to the target's connection now may turn a finished answer into an error.
            log.info("%s failed after the end of its answer: %s", attempt.plan.target.name, redacted(failure))
        finally:
            if not ended:
                await close_chunks(chunks)
        await _deliver(generation, attempt.finish(now()), reply)

    def _deadlines(self, generation: Generation, attempt: Attempt, now: float) -> tuple[float, float]:
        """Deadlines of the complete answer and of its first token."""
        target = attempt.plan.target
        if generation.job is not None and target.at == "cloud":
            return generation.deadline, generation.deadline  # it waits in the cloud's queue
        defaults = self._timeouts.get(target.at, Timeouts())
        whole_s = defaults.whole_s if target.timeout_s is None else target.timeout_s
        first_s = defaults.first_token_s if target.first_token_timeout_s is None else target.first_token_timeout_s
        last = generation.deadline if generation.request.stream else generation.first_byte_by
        deadline = last if whole_s is None else min(last, now + whole_s)
        if first_s is None or not _streams_from_target(generation, attempt):
            return deadline, min(deadline, generation.first_byte_by)
        return deadline, min(deadline, generation.first_byte_by, now + first_s)


async def _embed(
    generation: Generation, attempt: Attempt, backend: Backend, call: BackendRequest, reply: Reply[AnswerHead]
) -> None:
    async with asyncio.timeout_at(call.deadline + _GRACE_S):
        embeddings = await backend.embed(call)
        attempt.complete(_now())
        await _deliver(generation, (embeddings,), reply)


async def _deliver(generation: Generation, pieces: tuple[Piece, ...], reply: Reply[AnswerHead]) -> None:
    for piece in pieces:
        if not generation.committed:
            await _commit(generation, reply)
        if (slow := _send(generation, piece, reply)) is not None:
            await slow


async def _commit(generation: Generation, reply: Reply[AnswerHead]) -> None:
    generation.committed = True
    await reply.commit(generation.head())


def _send(generation: Generation, piece: Piece, reply: Reply[AnswerHead]) -> Awaitable[None] | None:
    if piece.usage is not None:
        generation.usage = piece.usage
    return reply.send(piece)


async def close_chunks(chunks: AsyncIterator[Chunk]) -> None:
    """(3) Stop the target's work."""
    close = getattr(chunks, "aclose", None)
    if close is None:
        return
    with anyio.CancelScope(deadline=_now() + _CLOSE_S, shield=True):
        await close()


def with_temperature(request: Request, target: Target) -> Request:
    """Return the request with the target's temperature, if the client sets none."""
    sampling = request.sampling
    if sampling.temperature is not None or target.temperature is None or request.kind == "embedding":
        return request
    sampling = msgspec.structs.replace(sampling, temperature=target.temperature)
    return msgspec.structs.replace(request, sampling=sampling)


def _streams_from_target(generation: Generation, attempt: Attempt) -> bool:
    """Whether the first token arrives before the complete answer."""
    return generation.request.stream or attempt.plan.handoff is not None or attempt.plan.target.at == "edge"


def _timeout_error(generation: Generation, attempt: Attempt, error: Exception) -> CausewayError:
    """(2) takes precedence over (1): with no time left another target is pointless."""
    target = attempt.plan.target
    if _now() >= generation.deadline - _TIMER_STEP_S:
        return DeadlineExceeded(f"the deadline passed while {target.name} was answering")
    if isinstance(error, CloudTimeout):
        return error
    timeout = EngineTimeout if target.at == "edge" else CloudTimeout
    if attempt.tokens == 0:
        return timeout(f"{target.name} sent no first token before its timeout", phase="first_token")
    return timeout(f"{target.name} did not finish before its timeout", phase="stream")


def _no_backend(target: Target) -> BackendError:
    key = "engine.enabled is false" if target.at == "edge" else "cloud.url is not set"
    return TargetNotConfigured(f"{target.name}: {key} on this box", phase="connect")


def _as_causeway_error(failure: Exception, target: Target) -> CausewayError:
    """Any other exception is a backend failure too. Its message may quote the request and is dropped."""
    if isinstance(failure, CausewayError):
        return failure
    log.error("%s failed unexpectedly: %s", target.name, redacted(failure))
    return BackendError(f"{target.name} failed unexpectedly ({type(failure).__name__})")


def _fail(attempt: Attempt, error: CausewayError) -> None:
    # The attempt may be done already: the client can disconnect while its last piece is being sent.
    if attempt.state is not AttemptState.DONE:
        attempt.fail(error, _now())


def _refuse_skipped(generation: Generation) -> None:
    """Raise BackendError if a check's first choice is down and was skipped: only a degraded answer could be made."""
    decision = generation.decision
    if decision is None or not decision.skipped_target:
        return
    target = next(plan.target for plan in decision.attempts if plan.target.name == decision.skipped_target)
    down = EngineUnavailable if target.at == "edge" else BreakerOpen
    raise down(f"{target.name} is down, and a degraded answer is no check", phase="connect")


def _refuse_degraded(generation: Generation) -> None:
    """Raise BackendError if a check's new answer, of which no byte was sent, is degraded, as the cached one is not."""
    if generation.degraded:
        raise BackendError("the answer is degraded, and the cached one is not")


def _now() -> float:
    return asyncio.get_running_loop().time()
