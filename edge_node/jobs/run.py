"""A run of a job on the service: its request, its answer, and the errors that determine the next step.

While an answer is made, its text is shown to clients that follow the job's events (`JobFeed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.abc
import msgspec

from causeway_server.router.errors import (
    BreakerOpen,
    CausewayError,
    CloudSaturated,
    CloudUnavailable,
    CloudUnreachable,
    Draining,
    EngineUnavailable,
    JobStoreUnavailable,
    QueueFull,
    RateLimited,
    ResultTooLarge,
)
from causeway_server.router.jobs.submission import FirstText, encode_job_answer, parse_job_request
from causeway_server.router.openai.answer import CachedAnswer
from causeway_server.router.serving.reply import AnswerHead, Piece
from causeway_server.router.types import Chunk, Embeddings, Request, RoutingHints

from ..backends.backend import JobTerms
from ..clock import Clock, DeviceTime
from ..config.schema import OutboxConfig
from ..serving.requests import RequestContext
from ..serving.service import Service
from .record import Claimed, JobAnswer, Lane

log = logging.getLogger(__name__)

# The cloud is unreachable or full: its jobs wait, and this does not count as an attempt.
CLOUD_AWAY = (CloudUnreachable, CloudUnavailable, CloudSaturated, BreakerOpen)
# The device is not ready: the same.
DEVICE_BUSY = (EngineUnavailable, QueueFull, RateLimited, Draining, JobStoreUnavailable)


class RunFailure(msgspec.Struct, frozen=True):
    """A failed run. `errors`: those of its attempts, more specific than the final one; the last decides."""

    errors: list[CausewayError]
    decision: str


@dataclass(eq=False, repr=False)
class JobRuns:
    """Runs jobs on the service. `time`: the device's own time; `new_id`: function that makes ids of decisions."""

    service: Service
    config: OutboxConfig
    time: DeviceTime
    clock: Clock
    new_id: Callable[[], str]

    def request(self, claimed: Claimed, target: str) -> Request:
        """Return the request as it runs now, at `target` if that is set. InvalidRequest: this version refuses it."""
        job = claimed.job
        left_ms = max(1, int((job.deadline - self.time.now()) * 1000.0))
        hints = RoutingHints(prefer=job.prefer, tags=job.tags, client=job.owner, priority=job.priority)
        request = parse_job_request(job.endpoint, claimed.body, hints)
        hints = msgspec.structs.replace(request.hints, deadline_ms=left_ms)
        if not job.may_leave:
            hints = msgspec.structs.replace(hints, prefer="only_on_device")
        return msgspec.structs.replace(
            request, hints=hints, model=target or request.model, stream=request.kind != "embedding"
        )

    async def lane(self, request: Request) -> Lane:
        """Return where the policy would run a job now: the device, where it fails, if that cannot be decided."""
        try:
            decision = await self.service.preview(request)
        except CausewayError:
            return "edge"
        return decision.attempts[0].target.at if decision.attempts else "edge"

    async def answer(
        self, claimed: Claimed, request: Request, text: RunningText, terms: JobTerms
    ) -> JobAnswer | RunFailure:
        """Run a job's request once. `text` shows the answer."""
        decision = self.new_id()
        reply = JobReply(claimed, request, decision, int(self.clock.unix()), text)
        context = RequestContext(request, reply, id=decision, arrived=self.clock.monotonic(), job=terms)
        try:
            await self.service.answer(context)
            result = reply.body(self.clock.monotonic() - context.arrived)
            if len(result) > self.config.max_result_bytes:
                raise ResultTooLarge(f"The answer is larger than {self.config.max_result_bytes} bytes.")
        except CausewayError as error:
            return RunFailure(_errors(context, error), decision)
        assert reply.head is not None
        return JobAnswer(result, context.cache, reply.head.route, decision)


def _errors(context: RequestContext, error: CausewayError) -> list[CausewayError]:
    """Return the errors of the attempts; `error` if the last one has none."""
    sequence = context.generation.sequence
    errors = [] if sequence is None else [attempt.error for attempt in sequence.attempts]
    return [one for one in errors if one is not None] if errors and errors[-1] is not None else [error]


class RunningJobs:
    """The running jobs by number, with their lanes."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Lane, anyio.CancelScope]] = {}

    def start(self, seq: int, lane: Lane) -> anyio.CancelScope:
        scope = anyio.CancelScope()
        self._running[seq] = (lane, scope)
        return scope

    def end(self, seq: int) -> None:
        self._running.pop(seq, None)

    def stop(self, seq: int) -> None:
        if (running := self._running.get(seq)) is not None:
            running[1].cancel()

    def count(self, lane: Lane) -> int:
        return sum(1 for running, _ in self._running.values() if running == lane)


class JobReply:
    """Collects one answer. Call `end` before `body`. `text` shows it, if it has one choice; `created`: Unix s."""

    def __init__(self, claimed: Claimed, request: Request, decision: str, created: int, text: RunningText) -> None:
        self._claimed = claimed
        self._request = msgspec.structs.replace(request, stream=False)
        self._decision = decision
        self._created = created
        self._text, self._shown = text, FirstText(claimed.job.endpoint, request.sequences)
        self._unfinished = request.sequences
        self._chunks: list[Chunk] = []
        self._answer: CachedAnswer | Embeddings | None = None  # an answer that came complete
        self.head: AnswerHead | None = None

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    async def send(self, piece: Piece) -> None:
        if isinstance(piece, Embeddings):
            self._answer = piece
            return
        self._chunks.append(piece)
        self._unfinished -= piece.finish_reason is not None
        if text := self._shown.of(piece):
            self._text.append(text)

    @property
    def finished(self) -> bool:
        return self._unfinished <= 0

    async def replay(self, head: AnswerHead, answer: CachedAnswer | Embeddings) -> None:
        self.head, self._answer = head, answer

    async def end(self) -> None:
        """Do nothing: the answer is collected, not sent."""

    def body(self, elapsed_s: float) -> bytes:
        """Return the complete answer, JSON. `elapsed_s`: the time since `created`."""
        assert self.head is not None
        answer, job = self._answer, self._claimed.job
        model = answer.model if isinstance(answer, CachedAnswer) else self.head.model
        return encode_job_answer(
            job.endpoint,
            self._claimed.body,
            self._request,
            self._decision,
            model,
            self._created,
            elapsed_s,
            self._chunks if answer is None else answer,
            self.head.temperature,
        )


class _Signal:
    """Wakes all tasks that wait for a change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    async def change(self, seconds: float) -> None:
        """Wait for the next change, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()
        self._changed.clear()


class RunningText(_Signal):
    """The text of the only choice of one run so far."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run
        self.text = ""
        self.ended = False  # its final text is in the store

    def append(self, text: str) -> None:
        self.text += text
        self.wake()


class JobFeed(_Signal):
    """The texts of all running jobs, by the job's number. It signals a change when a run starts or ends."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, RunningText] = {}

    def start(self, seq: int, run: int) -> RunningText:
        text = self._texts[seq] = RunningText(run)
        self.wake()
        return text

    def get(self, seq: int) -> RunningText | None:
        """Return the text of a running job; None if the job does not run."""
        return self._texts.get(seq)

    def end(self, seq: int) -> None:
        """Record that a run has ended and that its end is stored."""
        if (text := self._texts.pop(seq, None)) is not None:
            text.ended = True
            text.wake()
        self.wake()
