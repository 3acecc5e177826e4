"""A run of a claimed job: its stored request -> chunks -> the body of OpenAI's answer -> its report.

A run takes a slot of its tier. Its report goes to the job store under the fence of its lease. This module also decides
what follows from a failed run.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from itertools import cycle, islice
from typing import Final, Literal, Protocol, TypeVar

import anyio
import msgspec

from causeway_server.router import errors
from causeway_server.router.errors import CausewayError
from causeway_server.router.jobs.submission import FirstText, encode_job_answer, parse_job_request
from causeway_server.router.parts.reading import text_bytes
from causeway_server.router.serving.logs import redacted
from causeway_server.router.types import Chunk, Embeddings, RoutingHints

from ...admission import Priority
from ...cache.caching_service import STATUS_HEADER
from ...core.request_context import AnswerHead
from ...storage.config import JobsConfig
from ...storage.encryption import ContentKeyMissing
from ...storage.job_store import JobStore
from ...storage.record import JobRecord, RunBill
from ...upstreams.triton.errors import StubProcessDied
from .runner import JobRun, JobRunner, RunReceipt, TokenRevoked

_PROGRESS_INTERVAL_S = 1.0
log = logging.getLogger(__name__)
ReportProgress = Callable[[bytes], Awaitable[None]]
"""Callback that gets a RunProgress as JSON."""
FailureAction = Literal["expired", "cancelled", "failed", "postponed", "retried"]
_NOT_STARTED = (
    *(errors.QueueFull, errors.Shed, errors.RateLimited, errors.Draining, errors.CloudSaturated, errors.BreakerOpen),
    *(errors.EngineUnavailable, errors.NoRoute, errors.IdentityUnavailable, ContentKeyMissing),
)
_T = TypeVar("_T")
_STORE_DELAY_S = 0.2
_FINAL_EVENTS: Final[Mapping[FailureAction, Literal["fail", "expire", "cancel"]]] = {
    "failed": "fail",
    "expired": "expire",
    "cancelled": "cancel",
}
_LETTERS: Final[Mapping[str, Priority]] = {"i": "interactive", "s": "standard", "b": "bulk"}
TURNS: Final = tuple(_LETTERS[letter] for letter in "isiibisiiisi")
"""Priority that each free slot prefers, in turn: 8 interactive, 3 standard, 1 bulk, so that bulk jobs never starve.

The order is that of nginx's smooth weighted round robin: upstream module, commit
52327e0627f49dbda1e8db695e63a4b0af4448b1.
"""
_LIMIT_POLL_S = 0.25  # the shared limit changes twice a second


class RunProgress(msgspec.Struct, frozen=True):
    """Data of a progress event."""

    tokens: int


class JobResult(msgspec.Struct, frozen=True):
    """An answer. `cache`: outcome of the shared cache; "" without one."""

    body: bytes
    cache: str = ""


def job_run_of(record: JobRecord, deadline: float, receipt: RunReceipt | None = None) -> JobRun:
    """Return a job's run with its request as sent. `deadline`: monotonic seconds. Raises InvalidRequest."""
    hints = RoutingHints(client=record.owner, tags=record.tag_list)
    request = parse_job_request(record.endpoint, record.body, hints)
    return JobRun(
        record=record,
        request=request,
        body_bytes=text_bytes(request, len(record.body)),
        deadline=deadline,
        receipt=receipt or RunReceipt(),
    )


async def execute(
    record: JobRecord,
    runner: JobRunner,
    config: JobsConfig,
    *,
    left_s: float,
    receipt: RunReceipt,
    max_bytes: int | None = None,
    report_progress: ReportProgress | None = None,
    on_text: Callable[[str], None] = lambda _: None,
) -> JobResult | CausewayError:
    """Run a job and return its answer or its error. Raise only cancellation.

    Args:
        left_s: Time left for the job; a run gets at most `attempt_timeout_s` of it.
        max_bytes: Maximum size of the answer's body, besides `max_result_bytes`.
        report_progress: Callback that gets a RunProgress as JSON, at most once per second.
        on_text: Callback for each part of the text, if the answer is a single text.
    """
    left_s, started = max(0.0, min(config.attempt_timeout_s, left_s)), time.monotonic()
    try:
        with anyio.fail_after(left_s):
            job_run = job_run_of(record, time.monotonic() + left_s, receipt)
            cache, answer = await _collect(runner, job_run, report_progress, on_text)
        created, elapsed_s = record.begun // 1000, time.monotonic() - started
        body = encode_job_answer(
            record.endpoint, record.body, job_run.request, record.id, record.tier, created, elapsed_s, answer
        )
    except TimeoutError:
        return errors.DeadlineExceeded("The time for this run is over.")
    except CausewayError as error:
        return error
    except Exception as error:
        log.error("A run of job %s failed unexpectedly: %s", record.id, redacted(error))
        return CausewayError("The worker failed.")
    bound = config.max_result_bytes if max_bytes is None else min(max_bytes, config.max_result_bytes)
    if len(body) > bound:
        return errors.ResultTooLarge(f"The answer is larger than {bound} bytes. Ask for fewer tokens.")
    return JobResult(body, cache)


async def _collect(
    runner: JobRunner, job_run: JobRun, report_progress: ReportProgress | None, on_text: Callable[[str], None]
) -> tuple[str, list[Chunk] | Embeddings]:
    cache, chunks, vectors = "", list[Chunk](), None
    tokens, reported_at = 0, time.monotonic()
    shown = FirstText(job_run.record.endpoint, job_run.request.sequences)
    async with aclosing(runner.run(job_run)) as pieces:
        async for piece in pieces:
            if isinstance(piece, AnswerHead):
                cache = dict(piece.headers).get(STATUS_HEADER, "")
                continue
            if isinstance(piece, Embeddings):
                vectors = piece
                continue
            chunks.append(piece)
            tokens += piece.tokens
            if text := shown.of(piece):
                on_text(text)
            if report_progress is not None and time.monotonic() - reported_at >= _PROGRESS_INTERVAL_S:
                reported_at = time.monotonic()
                await report_progress(msgspec.json.encode(RunProgress(tokens)))
    return cache, chunks if vectors is None else vectors


def classify_failure(error: CausewayError, *, late: bool) -> FailureAction:
    """Return the outcome of a job whose run failed. `late`: the job's own deadline has passed.

    1. The job's deadline has passed                              expired
       The token that submitted it, or its device, is revoked     cancelled
    2. The request is invalid (4xx of ours), or bound elsewhere   failed: another run would fail, too
    3. It never ran: the tier is unreachable, full or starting    postponed: retried without losing an attempt
    4. Any other error, a crash of the model or a bug included    retried later, as one of its attempts

    A job that kills the model's process or the whole Triton is (4): it must end as a dead letter. A Triton that is down
    for hours does not use up attempts, because a worker claims no jobs for a tier that does not answer (see `worker`).
    """
    if late:
        return "expired"  # (1)
    if isinstance(error, TokenRevoked):
        return "cancelled"
    refused = isinstance(error, (errors.InvalidRequest, errors.PermissionDenied, errors.OutsideRegion))
    if refused and not isinstance(error, errors.RequestTimeout):
        return "failed"  # (2)
    if was_not_started(error):
        return "postponed"  # (3)
    return "retried"  # (4)


def is_tier_unavailable(error: CausewayError) -> bool:
    """Return whether other jobs of the tier would currently fail as well."""
    return isinstance(error, errors.BackendError) and error.status == 503


def was_not_started(error: CausewayError) -> bool:
    """Return whether the error proves that the request did not reach a model."""
    if isinstance(error, StubProcessDied):
        return False  # this request may have killed the model's process
    if isinstance(error, errors.BackendError) and error.phase == "connect":
        return True
    return isinstance(error, _NOT_STARTED) and not isinstance(error, errors.DeadlineExceeded)


class JobLease:
    """A job that this worker runs. `now`: monotonic s. The deadline counts from the claim, timed by Redis's clock."""

    def __init__(self, record: JobRecord, now: float) -> None:
        self.record = record
        self.deadline = now + (record.deadline - record.begun) / 1000.0  # monotonic, s
        self.scope = anyio.CancelScope()
        self.release_on_exit = False


@dataclass(eq=False, repr=False)
class RunReports:
    """Reports of runs to the job store."""

    store: JobStore
    config: JobsConfig
    _: KW_ONLY
    rng: Callable[[], float] = random.random  # random numbers, uniform in [0, 1)

    async def report(self, lease: JobLease, result: JobResult | CausewayError, bill: RunBill | None) -> str:
        """Report a run to the job store, and return the outcome."""
        return await self.until_stored(lease.record.id, lambda: self._report_once(lease, result, bill))

    async def until_stored(self, job: str, report: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `report`, repeated while Redis is away: the answer is worth more than the slot."""
        while True:
            try:
                # Shielded: a report that is cut off may have been accepted all the same.
                with anyio.CancelScope(shield=True):
                    return await report()
            except errors.JobStoreUnavailable as error:
                log.warning("The report about job %s waits for Redis: %s", job, error.message)
                await anyio.sleep(_STORE_DELAY_S * (1.0 + self.rng()))

    def delay_s(self, error: CausewayError, attempts: int) -> float:
        """Return the delay before a failed run is repeated."""
        return self.config.retry_delay_s(error, attempts, self.rng())

    async def _report_once(self, lease: JobLease, result: JobResult | CausewayError, bill: RunBill | None) -> str:
        """Report once. The call can be repeated. Raises JobStoreUnavailable."""
        record = lease.record
        job, fence = record.id, record.fence
        if isinstance(result, JobResult):
            sealed = self.store.seal_result(record, result.body)
            accepted = await self.store.succeed(job, fence, sealed, result.cache, bill=bill)
            return "succeeded" if accepted else "superseded"
        action = classify_failure(result, late=time.monotonic() >= lease.deadline)
        if action in _FINAL_EVENTS:
            accepted = await self.store.fail(job, fence, result, _FINAL_EVENTS[action], bill=bill)
        else:
            counts = action == "retried"
            delay_s = self.delay_s(result, record.attempts if counts else record.postponed + 1)
            park = isinstance(result, errors.RateLimited) and result.retry_after_s is not None
            accepted = await self.store.postpone(job, fence, result, delay_s, counts=counts, park=park, bill=bill)
        return action if accepted else "superseded"


class SharedLimit(Protocol):
    """The interface of a worker's part of a tier's permits, such as `admission.AdmissionController`."""

    wants_more: bool

    @property
    def limit(self) -> int:
        """Number of sequences that may run."""

    @property
    def demand(self) -> int:
        """Number of sequences that run or wait."""


class WorkerSlots:
    """The slots of one tier in this worker: `count`, or fewer if the worker's part of the tier's permits is smaller."""

    def __init__(self, tier: str, count: int, shared_limit: SharedLimit | None = None) -> None:
        self.tier = tier
        self._count = count
        self._shared_limit = shared_limit
        self._used = 0
        self._turns = cycle(TURNS)
        self.tier_unavailable = False
        self._slot_released = anyio.Event()
        self.set_wants_more(True)  # until the first claim

    @property
    def free(self) -> int:
        free = self._count - self._used
        if self._shared_limit is None:
            return free
        # A job may be of several sequences, and it is not in admission from its first moment on.
        return min(free, self._shared_limit.limit - max(self._used, self._shared_limit.demand))

    def set_wants_more(self, more: bool) -> None:
        """Record whether more jobs may be queued than were claimed."""
        if self._shared_limit is not None:
            self._shared_limit.wants_more = more

    def preferred(self, slots: int) -> tuple[Priority, ...]:
        """Return the preferred priority of each slot. Slots of a priority without jobs go to the most urgent others."""
        return tuple(islice(self._turns, slots))

    def acquire(self) -> None:
        """Return each slot's preferred priority. Slots without jobs go to the most urgent others."""
        self._used += 1

    def release(self) -> None:
        self._used -= 1
        self._slot_released.set()
        self._slot_released = anyio.Event()

    async def wait_for_slot(self) -> None:
        """Wait until a slot is free."""
        while self.free <= 0:
            with anyio.move_on_after(_LIMIT_POLL_S):
                await self._slot_released.wait()
