"""One try at one target, as a table.

The service feeds what happens and is told what to do; it decides nothing about order (router/course), holding back,
or switching:

    course = Course(decision, stream=request.stream, choices=request.n, arrived=now)
    while (attempt := course.begin()) is not None:
        try:
            attempt.start(now)
            async for chunk in backend.generate(...):
                for piece in attempt.offer(chunk, now):   # may raise LowConfidence: a handoff
                    await send(piece)
            for piece in attempt.finish(now):             # may raise StreamBroken: the answer had no end
                await send(piece)
            break
        except CausewayError as error:
            attempt.fail(error, now)
            if course.next_step(error) == "raise":
                raise course.failure(error) from error

Times are monotonic seconds given by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal

from ..errors import CausewayError, ClientGone, DeadlineExceeded, LowConfidence, StreamBroken
from ..types import AttemptPlan, AttemptRecord, Chunk, Confidence, Handoff


class AttemptState(str, Enum):
    PENDING = "pending"  # planned, nothing was asked of the target
    WAITING = "waiting"  # asked; nothing came back
    HOLDING = "holding"  # first tokens are held back until their confidence decides
    COLLECTING = "collecting"  # sure enough, but the client wants the whole answer at once: nothing was sent
    COMMITTED = "committed"  # the first byte is released to the client
    DONE = "done"
    FAILED = "failed"
    HANDED_OFF = "handed_off"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class AttemptEvent(str, Enum):
    START = "start"  # the target is asked
    HOLD = "hold"  # a first piece came, and the plan has a handoff
    COLLECT = "collect"  # a piece came that may be kept, and the client does not stream
    COMMIT = "commit"  # a piece is released to the client
    UNSURE = "unsure"  # confidence of the held tokens is under the handoff's bound
    LAST_CHUNK = "last_chunk"  # the answer's end is released to the client
    ERROR = "error"
    CANCEL = "cancel"  # the caller left, or the daemon stops
    DEADLINE = "deadline"


# An error, a caller who leaves and the deadline may come at any moment before the end.
_INTERRUPTS: Mapping[AttemptEvent, AttemptState] = {
    AttemptEvent.ERROR: AttemptState.FAILED,
    AttemptEvent.CANCEL: AttemptState.CANCELLED,
    AttemptEvent.DEADLINE: AttemptState.TIMED_OUT,
}

# A missing key is an illegal transition: a bug of the caller, never of the target.
TABLE: Mapping[AttemptState, Mapping[AttemptEvent, AttemptState]] = {
    # ERROR before START: the breaker refused, the engine is not there.
    AttemptState.PENDING: {AttemptEvent.START: AttemptState.WAITING, **_INTERRUPTS},
    # Three ways on: hold back for confidence, collect for a client that does not stream, or straight to the client.
    AttemptState.WAITING: {
        AttemptEvent.HOLD: AttemptState.HOLDING,
        AttemptEvent.COLLECT: AttemptState.COLLECTING,
        AttemptEvent.COMMIT: AttemptState.COMMITTED,
        **_INTERRUPTS,
    },
    # The only state that may hand off: nothing has reached the client and somebody else can answer.
    AttemptState.HOLDING: {
        AttemptEvent.UNSURE: AttemptState.HANDED_OFF,
        AttemptEvent.COLLECT: AttemptState.COLLECTING,
        AttemptEvent.COMMIT: AttemptState.COMMITTED,
        **_INTERRUPTS,
    },
    # An answer that is collected and breaks in the middle may still be answered by the next target.
    AttemptState.COLLECTING: {AttemptEvent.COMMIT: AttemptState.COMMITTED, **_INTERRUPTS},
    # Bytes have reached the client: an error ends the answer, it never switches target. No UNSURE here.
    AttemptState.COMMITTED: {AttemptEvent.LAST_CHUNK: AttemptState.DONE, **_INTERRUPTS},
    AttemptState.DONE: {},
    AttemptState.FAILED: {},
    AttemptState.HANDED_OFF: {},
    AttemptState.CANCELLED: {},
    AttemptState.TIMED_OUT: {},
}


class IllegalTransition(RuntimeError):
    """The caller fed an event that the table does not know in this state."""


HandoffVerdict = Literal["wait", "sure", "unsure"]


class HandoffGate:
    """Watches the first tokens of choice 0 and decides once.

    1. enough tokens, or choice 0 ended earlier: the latest confidence is compared with `below`;
    2. the target reported no confidence: sure (there is nothing to doubt it by), and `detail` says so.
    """

    def __init__(self, handoff: Handoff) -> None:
        self._handoff = handoff
        self._tokens = 0
        self.confidence: Confidence | None = None
        self.detail = ""

    def offer(self, chunk: Chunk) -> HandoffVerdict:
        if chunk.index == 0:
            self._tokens += chunk.tokens
            self.confidence = chunk.confidence or self.confidence
        ended = (chunk.index == 0 and chunk.finish_reason is not None) or chunk.usage is not None
        if self._tokens < self._handoff.after_tokens and not ended:
            return "wait"
        if self.confidence is None:  # (2)
            self.detail = "no confidence reported: kept"
            return "sure"
        return "unsure" if self.confidence.score < self._handoff.below else "sure"  # (1)


class Attempt:
    """One plan being tried. Owns its state, its times and the pieces that the client has not got yet."""

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
        self._hold = None if plan.handoff is None else HandoffGate(plan.handoff)
        self._kept: list[Chunk] = []
        self._started: float | None = None
        self._first: float | None = None
        self._ended: float | None = None
        self._sent = False

    def on(self, event: AttemptEvent, now: float) -> AttemptState:
        """Moves by the table. Raises IllegalTransition for a pair that it lacks."""
        following = TABLE[self.state].get(event)
        if following is None:
            raise IllegalTransition(f"{event.value} in state {self.state.value} of {self.plan.target.name}")
        if event is AttemptEvent.START:
            self._started = now
        if not TABLE[following]:
            self._ended = now
            self._kept = []  # an attempt that ended holds no text
        self.state = following
        return following

    def start(self, now: float) -> None:
        self.on(AttemptEvent.START, now)

    def offer(self, chunk: Chunk, now: float) -> tuple[Chunk, ...]:
        """Takes a piece from the target; returns the pieces to send now.

        Raises LowConfidence when the held tokens were not sure enough (state: HANDED_OFF).
        """
        self._measure(chunk, now)
        if self.state is AttemptState.COMMITTED:
            return (chunk,)
        self._kept.append(chunk)
        if self._hold is not None and not self._decide(self._hold, chunk, now):
            return ()
        if not self._stream:
            if self.state is not AttemptState.COLLECTING:
                self.on(AttemptEvent.COLLECT, now)
            return ()
        return self._release(now)

    def finish(self, now: float) -> tuple[Chunk, ...]:
        """The target has nothing more. Returns what is still to be sent.

        Raises StreamBroken (phase `stream`) if a choice never got its finish_reason: half an answer is no answer.
        The state is then unchanged, and `fail` says the rest.
        """
        if self._unfinished:
            raise StreamBroken(f"{self.plan.target.name} stopped before the end of its answer", phase="stream")
        pieces = () if self.state is AttemptState.COMMITTED else self._release(now)
        self.on(AttemptEvent.LAST_CHUNK, now)
        return pieces

    def complete(self, now: float) -> None:
        """The answer is one value and not chunks (embeddings), and goes to the client now."""
        self._first = now
        self.on(AttemptEvent.COMMIT, now)
        self._sent = True
        self.on(AttemptEvent.LAST_CHUNK, now)

    def fail(self, error: CausewayError, now: float) -> None:
        """The attempt broke. A handoff (LowConfidence from `offer`) ended it already: then only the error is kept."""
        self.error = error
        if self.state is AttemptState.HANDED_OFF:
            return
        event = AttemptEvent.ERROR
        if isinstance(error, DeadlineExceeded):
            event = AttemptEvent.DEADLINE
        elif isinstance(error, ClientGone):
            event = AttemptEvent.CANCEL
        self.on(event, now)

    @property
    def committed(self) -> bool:
        """Whether the client has bytes of this attempt, also when it failed later."""
        return self._sent

    @property
    def ended(self) -> bool:
        return not TABLE[self.state]

    def record(self, now: float) -> AttemptRecord:
        started = self._started if self._started is not None else (self._ended if self._ended is not None else now)
        ended = self._ended if self._ended is not None else now
        return AttemptRecord(
            target=self.plan.target.name,
            at=self.plan.target.at,
            state=self.state.value,
            started_ms=_ms(started - self._arrived),
            ttft_ms=None if self._first is None else _ms(self._first - started),
            duration_ms=_ms(ended - started),
            tokens=self.tokens,
            confidence=self.confidence,
            error="" if self.error is None else self.error.code,
            detail=self.detail or ("" if self.error is None else self.error.message),
        )

    def _measure(self, chunk: Chunk, now: float) -> None:
        if self._first is None and (chunk.text or chunk.tokens or chunk.tool_calls):
            self._first = now
        self.tokens += chunk.tokens
        self.confidence = chunk.confidence or self.confidence
        if chunk.finish_reason is not None:
            self._unfinished.discard(chunk.index)

    def _decide(self, hold: HandoffGate, chunk: Chunk, now: float) -> bool:
        """Whether the held pieces may go on. Raises LowConfidence."""
        if self.state is AttemptState.WAITING:
            self.on(AttemptEvent.HOLD, now)
        verdict = hold.offer(chunk)
        if verdict == "wait":
            return False
        self._hold = None  # decided once; later pieces pass
        self.detail = hold.detail
        if verdict == "unsure":
            raise self._hand_off(hold, now)
        return True

    def _hand_off(self, hold: HandoffGate, now: float) -> LowConfidence:
        self.on(AttemptEvent.UNSURE, now)
        assert hold.confidence is not None
        assert self.plan.handoff is not None
        self.detail = f"confidence {hold.confidence.score:.3f} below {self.plan.handoff.below:g}"
        return LowConfidence(f"{self.plan.target.name}: {self.detail}", phase="first_token")

    def _release(self, now: float) -> tuple[Chunk, ...]:
        self.on(AttemptEvent.COMMIT, now)
        self._sent = True
        pieces, self._kept = tuple(self._kept), []
        return pieces


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
