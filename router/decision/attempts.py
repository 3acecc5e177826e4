"""The attempts of one decision: the state machine of each attempt (`TABLE`), and their order (`AttemptSequence`).

The caller feeds events and does the I/O. Everything else is decided here: holding back first tokens, releasing them,
and whether the next target may take over. `final_error` makes the client's error in the end.

    sequence = AttemptSequence(decision, stream=request.stream, choices=request.n, arrived=now)
    while (attempt := sequence.next_attempt()) is not None:
        try:
            attempt.start(now)
            async for chunk in backend.generate(...):
                for released in attempt.receive(chunk, now):   # may raise LowConfidence: a handoff
                    await send(released)
            for released in attempt.finish(now):               # may raise StreamBroken: the answer has no end
                await send(released)
            break
        except CausewayError as error:
            attempt.fail(error, now)
            if sequence.next_step(error) == "raise":
                raise final_error(sequence.attempts, error) from error

`now` is always monotonic time in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from ..errors import (
    AllAttemptsFailed,
    BreakerOpen,
    CausewayError,
    ClientGone,
    CloudRefused,
    CloudRejected,
    CloudSaturated,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidGrammar,
    InvalidRequest,
    LowConfidence,
    QueueFull,
    StreamBroken,
    TargetNotConfigured,
    TargetsFailed,
    UnsupportedFeature,
)
from ..types import AttemptPlan, AttemptRecord, Chunk, Confidence, Decision, Handoff

HandoffVerdict = Literal["wait", "commit", "hand_off"]


class AttemptState(StrEnum):
    PENDING = "pending"  # planned; no request was sent to the target
    WAITING = "waiting"  # request sent; no chunk has arrived
    HOLDING = "holding"  # first tokens are held back until their confidence is known
    COLLECTING = "collecting"  # confident enough, but the client does not stream: nothing was sent yet
    COMMITTED = "committed"  # the first byte was released to the client
    DONE = "done"
    FAILED = "failed"
    HANDED_OFF = "handed_off"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class AttemptEvent(StrEnum):
    START = "start"  # the request goes to the target
    HOLD = "hold"  # the first chunk arrived, and the plan has a handoff
    COLLECT = "collect"  # a chunk arrived that may be kept, and the client does not stream
    COMMIT = "commit"  # chunks are released to the client
    LOW_CONFIDENCE = "low_confidence"  # the confidence of the held tokens is below the handoff's threshold
    LAST_CHUNK = "last_chunk"  # the end of the answer is released to the client
    ERROR = "error"
    CANCEL = "cancel"  # the client disconnected, or the daemon stops
    DEADLINE = "deadline"


# An error, a client that disconnects, and the deadline can come at any moment before the end.
_INTERRUPTS: Mapping[AttemptEvent, AttemptState] = {
    AttemptEvent.ERROR: AttemptState.FAILED,
    AttemptEvent.CANCEL: AttemptState.CANCELLED,
    AttemptEvent.DEADLINE: AttemptState.TIMED_OUT,
}

# A missing key is an illegal transition: a bug of the caller, never of the target.
TABLE: Mapping[AttemptState, Mapping[AttemptEvent, AttemptState]] = {
    # ERROR before START: the breaker is open, or there is no engine.
    AttemptState.PENDING: {AttemptEvent.START: AttemptState.WAITING, **_INTERRUPTS},
    # Three ways on: hold back for confidence, collect for a client that does not stream, or straight to the client.
    AttemptState.WAITING: {
        AttemptEvent.HOLD: AttemptState.HOLDING,
        AttemptEvent.COLLECT: AttemptState.COLLECTING,
        AttemptEvent.COMMIT: AttemptState.COMMITTED,
        **_INTERRUPTS,
    },
    # The only state from which a handoff is possible: nothing has reached the client, and another target can answer.
    AttemptState.HOLDING: {
        AttemptEvent.LOW_CONFIDENCE: AttemptState.HANDED_OFF,
        AttemptEvent.COLLECT: AttemptState.COLLECTING,
        AttemptEvent.COMMIT: AttemptState.COMMITTED,
        **_INTERRUPTS,
    },
    # If an answer breaks while it is collected, the next target may still answer.
    AttemptState.COLLECTING: {AttemptEvent.COMMIT: AttemptState.COMMITTED, **_INTERRUPTS},
    # Bytes have reached the client: an error ends the answer, it never switches target. No LOW_CONFIDENCE here.
    AttemptState.COMMITTED: {AttemptEvent.LAST_CHUNK: AttemptState.DONE, **_INTERRUPTS},
    AttemptState.DONE: {},
    AttemptState.FAILED: {},
    AttemptState.HANDED_OFF: {},
    AttemptState.CANCELLED: {},
    AttemptState.TIMED_OUT: {},
}


class IllegalTransition(RuntimeError):
    """The caller fed an event that `TABLE` does not allow in this state."""


class HandoffGate:
    """Watches the first tokens of choice 0 and decides once: release them, or let the next target take over.

    In a handoff the device starts an answer, and the next target takes over if the confidence of the first tokens is
    too low. Its parts are in these places:

    - policy: a route's ``handoff: {after_tokens, below, within}`` (`policy/file.py`, checked by `policy/lint.py`);
    - plan: `decide.plan_handoff` puts it on the attempts that may hand off;
    - confidence: the engine attaches `Confidence` to the first tokens of choice 0, and a `ConfidenceCalibrator` of the
      edge may turn its score into a probability;
    - hold back: `Attempt` keeps the first chunks, and the gate decides when and whether they are released. Below the
      threshold the attempt ends as HANDED_OFF with `LowConfidence`, and the client never sees its start.

    1. After enough tokens or enough time, or when choice 0 ends earlier, the latest confidence is compared with
       `below`. Time counts from the first token.
    2. Without a reported confidence the answer is kept, and `detail` records that.
    """

    def __init__(self, handoff: Handoff) -> None:
        self._handoff = handoff
        self._tokens = 0
        self._first_at: float | None = None
        self.confidence: Confidence | None = None
        self.detail = ""

    def observe(self, chunk: Chunk, now: float) -> HandoffVerdict:
        """Return the verdict on the chunks so far. `now`: monotonic seconds."""
        if chunk.index == 0:
            self._tokens += chunk.tokens
            if self._first_at is None and chunk.tokens:
                self._first_at = now
            self.confidence = chunk.confidence or self.confidence
        ended = (chunk.index == 0 and chunk.finish_reason is not None) or chunk.usage is not None
        if self._tokens < self._handoff.after_tokens and not ended and not self._late(now):
            return "wait"
        if self.confidence is None:  # (2)
            self.detail = "no confidence reported: kept"
            return "commit"
        return "hand_off" if self.confidence.score < self._handoff.below else "commit"  # (1)

    def _late(self, now: float) -> bool:
        within_s = self._handoff.within_s
        return within_s is not None and self._first_at is not None and now - self._first_at >= within_s


class Attempt:
    """The execution of one attempt plan. Owns its state, its times, and the chunks that are not released yet."""

    def __init__(self, plan: AttemptPlan, *, stream: bool, choices: int, arrived: float) -> None:
        self.plan = plan
        self.state = AttemptState.PENDING
        self.tokens = 0
        self.confidence: Confidence | None = None
        self.error: CausewayError | None = None
        self.detail = ""
        self._arrived = arrived
        self._stream = stream
        self._unfinished = set(range(choices))
        self._gate = None if plan.handoff is None else HandoffGate(plan.handoff)
        self.held: list[Chunk] = []  # not released yet
        self._started: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None
        self.committed = False  # the client has bytes of this attempt, also if it fails later

    def transition(self, event: AttemptEvent, now: float) -> AttemptState:
        """Move to the next state by `TABLE`. Raises IllegalTransition if the table has no such transition."""
        following = TABLE[self.state].get(event)
        if following is None:
            raise IllegalTransition(
                f"The event {event.value} is not allowed in the state {self.state.value} of the target "
                f"{self.plan.target.name}."
            )
        if event is AttemptEvent.START:
            self._started = now
        if not TABLE[following]:
            self._ended = now
            self.held = []  # an attempt that has ended keeps no text
        self.state = following
        return following

    def start(self, now: float) -> None:
        self.transition(AttemptEvent.START, now)

    def receive(self, chunk: Chunk, now: float) -> tuple[Chunk, ...]:
        """Accept a chunk from the target and return the chunks to send now.

        Raises:
            LowConfidence: The confidence of the held tokens is below the threshold; the state is then HANDED_OFF.
        """
        self._measure(chunk, now)
        if self.state is AttemptState.COMMITTED:
            return (chunk,)
        self.held.append(chunk)
        if self._gate is not None and not self._passes(self._gate, chunk, now):
            return ()
        if not self._stream:
            if self.state is not AttemptState.COLLECTING:
                self.transition(AttemptEvent.COLLECT, now)
            return ()
        return self._release(now)

    def finish(self, now: float) -> tuple[Chunk, ...]:
        """End the answer after the target's last chunk and return the chunks that are still to be sent.

        Raises:
            StreamBroken: A choice has no finish_reason (phase `stream`). The state does not change; call `fail`.
        """
        if self._unfinished:
            raise StreamBroken(f"{self.plan.target.name} stopped before the end of its answer.", phase="stream")
        released = () if self.state is AttemptState.COMMITTED else self._release(now)
        self.transition(AttemptEvent.LAST_CHUNK, now)
        return released

    def complete(self, now: float) -> None:
        """End an answer that is one value instead of chunks (embeddings) and is sent to the client now."""
        self._first_token = now
        self.transition(AttemptEvent.COMMIT, now)
        self.committed = True
        self.transition(AttemptEvent.LAST_CHUNK, now)

    def fail(self, error: CausewayError, now: float) -> None:
        """End the attempt with `error`. After a handoff the state stays HANDED_OFF, and only the error is kept."""
        self.error = error
        if self.state is AttemptState.HANDED_OFF:
            return
        event = AttemptEvent.ERROR
        if isinstance(error, DeadlineExceeded):
            event = AttemptEvent.DEADLINE
        elif isinstance(error, ClientGone):
            event = AttemptEvent.CANCEL
        self.transition(event, now)

    @property
    def abandoned(self) -> bool:
        """Whether the target was generating when the attempt was abandoned: it bills, but reports no usage."""
        if self._started is None or self.state is AttemptState.DONE or self.error is None:
            return False
        return self.tokens > 0 or isinstance(self.error, ClientGone | DeadlineExceeded | LowConfidence)

    @property
    def failed(self) -> bool:
        """Whether the target failed; a handoff, and the refusal of a request that it cannot serve, are not failures."""
        refused = isinstance(self.error, InvalidRequest)
        return self.state in (AttemptState.FAILED, AttemptState.TIMED_OUT) and not refused

    @property
    def whole(self) -> bool:
        """Whether every choice has its finish reason, so that only the usage may follow and the answer may be kept."""
        return not self._unfinished and self.state in (AttemptState.COLLECTING, AttemptState.COMMITTED)

    def record(self, now: float) -> AttemptRecord:
        started = self._started if self._started is not None else (self._ended if self._ended is not None else now)
        ended = self._ended if self._ended is not None else now
        target = self.plan.target
        return AttemptRecord(
            target=target.name,
            at=target.at,
            state=self.state.value,
            started_ms=_milliseconds(started - self._arrived),
            ttft_ms=None if self._first_token is None else _milliseconds(self._first_token - started),
            duration_ms=_milliseconds(ended - started),
            tokens=self.tokens,
            confidence=self.confidence,
            error="" if self.error is None else self.error.code,
            detail=self.detail or ("" if self.error is None else self.error.message),
            cloud=self.plan.target.cloud,
        )

    def _measure(self, chunk: Chunk, now: float) -> None:
        if self._first_token is None and (chunk.text or chunk.tokens or chunk.tool_calls):
            self._first_token = now
        self.tokens += chunk.tokens
        self.confidence = chunk.confidence or self.confidence
        self.detail = chunk.note or self.detail
        if chunk.finish_reason is not None:
            self._unfinished.discard(chunk.index)

    def _passes(self, gate: HandoffGate, chunk: Chunk, now: float) -> bool:
        """Return whether the held chunks may be released. Raises LowConfidence."""
        if self.state is AttemptState.WAITING:
            self.transition(AttemptEvent.HOLD, now)
        verdict = gate.observe(chunk, now)
        if verdict == "wait":
            return False
        self._gate = None  # decided once; later chunks pass
        self.detail = gate.detail
        if verdict == "hand_off":
            raise self._hand_off(gate, now)
        return True

    def _hand_off(self, gate: HandoffGate, now: float) -> LowConfidence:
        self.transition(AttemptEvent.LOW_CONFIDENCE, now)
        assert gate.confidence is not None
        assert self.plan.handoff is not None
        self.detail = f"confidence {gate.confidence.score:.3f} below {self.plan.handoff.below:g}"
        return LowConfidence(f"{self.plan.target.name}: {self.detail}", phase="first_token")

    def _release(self, now: float) -> tuple[Chunk, ...]:
        self.transition(AttemptEvent.COMMIT, now)
        self.committed = True
        released, self.held = tuple(self.held), []
        return released


def _is_of_the_target(error: CausewayError) -> bool:
    return error.retryable or isinstance(error, _TARGET_SPECIFIC)


# Another attempt can succeed: the next target may have a longer context or the feature, or accept the schema.
_TARGET_SPECIFIC = (ContextLengthExceeded, UnsupportedFeature, InvalidGrammar)


class AttemptSequence:
    """The attempts of one decision, in order: chooses the next attempt, and decides whether to try again after a
    failure. `choices`: the number of requested answers.
    """

    def __init__(self, decision: Decision, *, stream: bool, choices: int = 1, arrived: float) -> None:
        self.decision = decision
        self.attempts: list[Attempt] = []
        self._plans = list(decision.attempts)
        self._stream = stream
        self.choices = choices
        self._arrived = arrived
        self._tries_again = False

    def next_attempt(self) -> Attempt | None:
        """Return the next attempt (PENDING), or the last one, if it has not ended; None when no plan is left."""
        if self.attempts and TABLE[self.attempts[-1].state]:
            return self.attempts[-1]
        self._drop_failed_targets()
        if not self._plans:
            return None
        plan = self._plans.pop(0)
        attempt = Attempt(plan, stream=self._stream, choices=self.choices, arrived=self._arrived)
        self.attempts.append(attempt)
        return attempt

    def next_step(self, error: CausewayError) -> Literal["next", "raise"]:
        """Return whether another attempt follows this error.

        1. The client has bytes: no.
        2. No plan is left: no, unless a target was refused by its breaker before another one was tried. That took time
           in which the breaker may have closed: such targets are tried again, once.
        3. The target failed or handed off, or only this target cannot serve the request: yes.
        4. Anything else (the request is invalid, the deadline passed, the client disconnected): no.
        """
        self._drop_failed_targets()
        if not self._plans and not self._tries_again:
            self._plans = self._refused_early()
            self._tries_again = True
        if not self._plans or (self.attempts and self.attempts[-1].committed):  # (1) (2)
            return "raise"
        return "next" if _is_of_the_target(error) else "raise"  # (3) (4)

    def too_long_for(self, error: CausewayError) -> AttemptPlan | None:
        """Return the plan of the first target on the device whose context the request exceeds; None for none, or if
        no attempt may follow this error.
        """
        if self.attempts[-1].committed or not _is_of_the_target(error):
            return None
        return next(
            (
                msgspec.structs.replace(attempt.plan, handoff=None)
                for attempt in self.attempts
                if attempt.plan.target.at == "edge" and isinstance(attempt.error, ContextLengthExceeded)
            ),
            None,
        )

    def repeat(self, plan: AttemptPlan) -> None:
        """Make `plan` the next attempt, and the last one."""
        self._plans, self._tries_again = [plan], True

    @property
    def degraded(self) -> bool:
        """Whether the answer comes from another target than the policy's first choice, because of a failure.

        1. The first choice is down and was skipped, and another target answered.
        2. An earlier attempt failed. A handoff, or a request that a target cannot serve, does not count, nor does
           another cloud of the same target.
        """
        if not self.attempts:
            return False
        answering = self.attempts[-1].plan.target.name
        if self.decision.skipped_target not in ("", answering):  # (1)
            return True
        if len(self.attempts) == 1:  # nearly always
            return False
        before = self.attempts[:-1]
        return any(attempt.failed and attempt.plan.target.name != answering for attempt in before)  # (2)

    def records(self, now: float) -> tuple[AttemptRecord, ...]:
        return tuple([attempt.record(now) for attempt in self.attempts])

    def _refused_early(self) -> list[AttemptPlan]:
        """Return the plans whose breaker refused them before another target was tried."""
        is_refused = [isinstance(attempt.error, BreakerOpen) for attempt in self.attempts]
        tried = len(is_refused) - is_refused[::-1].index(False) if False in is_refused else 0
        return [attempt.plan for attempt in self.attempts[:tried] if isinstance(attempt.error, BreakerOpen)]

    def _drop_failed_targets(self) -> None:
        if self._tries_again:
            return
        # A target that appears twice is the last resort after a handoff. Its second attempt, without handoff, is made
        # only if the first one handed off: a target that failed is not tried again.
        while (
            self.attempts
            and self._plans
            and any(
                a.plan.target.name == self._plans[0].target.name
                and a.plan.target.cloud == self._plans[0].target.cloud
                and a.state is not AttemptState.HANDED_OFF
                for a in self.attempts
            )
        ):
            self._plans.pop(0)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000.0, 3)


def final_error(attempts: Sequence[Attempt], error: CausewayError) -> CausewayError:
    """Return the client's error after `error` ended the attempts of a decision.

    1. The request is invalid, late or abandoned, or the client already has bytes: `error` itself.
    2. Every available target refused the request or this device's credentials: the last refusal, with its status; if
       prompts were too long, all refusals.
    3. Every target is saturated: 429 with the shortest Retry-After.
    4. Every target was reached and failed: 502 with the reason of every attempt.
    5. Anything else: 503 with the reason of every attempt.
    """
    last = attempts[-1] if attempts else None
    if last is None or last.committed or not _is_of_the_target(error):  # (1)
        return error
    errors = [a.error for a in attempts if a.error is not None and not isinstance(a.error, LowConfidence)]
    refusals = [e for e in errors if not isinstance(e, TargetNotConfigured)]
    if refusals and all(isinstance(e, InvalidRequest | CloudRefused | CloudRejected) for e in refusals):  # (2)
        return _too_long(attempts) if all(isinstance(e, ContextLengthExceeded) for e in refusals) else refusals[-1]
    reasons = "; ".join(f"{a.plan.target.key}: {_failure_reason(a)}" for a in attempts)
    waits = [e.retry_after_s for e in errors if e.retry_after_s is not None]
    retry_after_s = min(waits) if waits else None
    if errors and all(isinstance(e, QueueFull | CloudSaturated) for e in errors):  # (3)
        return QueueFull(f"Every target is saturated: {reasons}.", retry_after_s=retry_after_s or 1.0)
    reached = bool(errors) and all(e.status == TargetsFailed.status for e in errors)
    kind = TargetsFailed if reached else AllAttemptsFailed
    return kind(f"Every attempt failed: {reasons}.", retry_after_s=retry_after_s)  # (4), (5)


def _too_long(attempts: Sequence[Attempt]) -> ContextLengthExceeded:
    """Join the refusals of all targets into one message, since each has its own context length."""
    refused = [(a.plan.target.key, a.error) for a in attempts if isinstance(a.error, ContextLengthExceeded)]
    if len(refused) == 1:
        return refused[0][1]
    message = " ".join(f"{name}: {error.message}" for name, error in refused)
    return ContextLengthExceeded(message, param=refused[-1][1].param)


def _failure_reason(attempt: Attempt) -> str:
    error = attempt.error
    return attempt.state.value if error is None else f"{error.code} ({error.message.removesuffix('.')})"
