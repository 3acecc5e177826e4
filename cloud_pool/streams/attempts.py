"""Attempts at one message until its answer or final error, on the service that runs jobs."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

import anyio
import msgspec

from causeway_server.router.errors import CausewayError, DeadlineExceeded, InvalidRequest
from causeway_server.router.jobs.job import JobState
from causeway_server.router.residency import check_region, regions_of
from causeway_server.router.serving.request import read_tags

from ..accounts.tenants.config import TenantLimits
from ..core.principal import Grants, Principal
from ..jobs.submission import JobSubmission, SubmissionParser
from ..jobs.worker.execution import JobResult, classify_failure, execute
from ..jobs.worker.runner import JobRunner, RunReceipt
from ..storage.config import JobsConfig
from ..storage.record import JobRecord, NewJob, RunBill
from .cloud_event import CloudEvent
from .config import StreamsConfig
from .metrics import StreamMetrics
from .outcome import StreamMessage

_DEVICE = "stream"
_JOB_ONLY: Mapping[str, str] = {
    "webhook": "the topic of answers receives its answer",
    "deadline_ms": "the event's `expirytime` is its deadline",
    "not_before_ms": "it always runs as soon as it can",
}
ReportFailure = Callable[[RunBill | None], Awaitable[None]]
"""Reports a failed run that may be repeated and is billed. Raises JobStoreUnavailable."""


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The last run of a message. Close the receipt when an outcome is recorded, by this run or another one."""

    result: JobResult | CausewayError
    attempts: int
    receipt: RunReceipt
    expired: bool = False


async def _ready(_: str) -> None:
    """No-op: there are no issuers."""


class MessageCallers(msgspec.Struct, frozen=True):
    """The senders of messages, and the limits of their tenants."""

    identify: Callable[[str], Principal]  # from the value of `Authorization` to the principal; raises CausewayError
    limits: Callable[[Principal], TenantLimits] = lambda _: TenantLimits()
    ready: Callable[[str], Awaitable[None]] = _ready  # waits for the keys of a token's issuer


@dataclass(eq=False, repr=False)
class MessageRunner:
    """Runs messages, until each has an answer or a final error."""

    config: StreamsConfig
    jobs: JobsConfig
    parser: SubmissionParser
    runner: JobRunner
    callers: MessageCallers
    metrics: StreamMetrics
    _: KW_ONLY
    clock: Callable[[], float] = time.time  # Unix seconds
    rng: Callable[[], float] = random.random  # random numbers, uniform in [0, 1)

    async def run(
        self, message: StreamMessage, authorization: str, attempts: int, report: ReportFailure, max_bytes: int
    ) -> EndedRun:
        """Run a message as often as necessary. `attempts`: so far, including this delivery.

        1. It cannot be read, is invalid, or its caller may not send it: an error at once.
        2. It has expired, or expires between two runs: DeadlineExceeded.
        3. The tier is unavailable, or the tenant is over a limit: wait, and run again. This is not an attempt.
        4. A run fails for another reason: run again, until its attempts are used up.
        """
        ends = message.expires_at(self.config.max_age_s)
        postponed = 0
        if message.event is None or message.fault is not None:
            fault = message.fault or InvalidRequest("The message cannot be read.")
            return EndedRun(result=fault, attempts=attempts, receipt=RunReceipt())
        while True:
            receipt = RunReceipt()
            result: JobResult | CausewayError = DeadlineExceeded("The message has expired.")
            if self.clock() < ends:
                result = await self._run_once(message, authorization, attempts, ends, receipt, max_bytes)
            ended = EndedRun(result=result, attempts=attempts, receipt=receipt, expired=self.clock() >= ends)
            if isinstance(result, JobResult):
                return ended
            action = classify_failure(result, late=ended.expired)
            counts = action == "retried"
            if action not in ("retried", "postponed") or (counts and attempts >= self.config.max_attempts):
                return ended
            self.metrics.count_retry(counted=counts)
            attempts, postponed = attempts + counts, postponed + (not counts)
            if counts:
                await report(receipt.bill)
            receipt.close(accepted=counts)
            delay_s = self.jobs.retry_delay_s(result, attempts if counts else postponed, self.rng())
            await anyio.sleep(max(0.0, min(delay_s, ends - self.clock())))

    async def _run_once(
        self,
        message: StreamMessage,
        authorization: str,
        attempts: int,
        ends: float,
        receipt: RunReceipt,
        max_bytes: int,
    ) -> JobResult | CausewayError:
        event = message.event
        assert event is not None
        try:
            await self.callers.ready(authorization)
            job = await self._submit(event, authorization)
        except CausewayError as error:
            return error
        now = int(self.clock() * 1000)
        record = JobRecord(
            id=f"msg_{message.effect}",
            owner=job.owner,
            tier=job.tier,
            priority=job.priority,
            endpoint=job.endpoint,
            body=job.body,
            state=JobState.RUNNING,
            created=now,
            deadline=job.deadline_ms,
            attempts=attempts,
            fence=attempts,
            tags=",".join(job.tags),
            traceparent=event.traceparent,
            token_id=job.token_id,
            token_issued=job.token_issued,
        )
        return await execute(
            record, self.runner, self.jobs, left_s=ends - self.clock(), receipt=receipt, max_bytes=max_bytes
        )

    async def _submit(self, event: CloudEvent, authorization: str) -> NewJob:
        """Check a message as a job is checked. Raises CausewayError."""
        if len(event.data) > self.jobs.max_body_bytes:
            raise InvalidRequest(f"`data` is larger than {self.jobs.max_body_bytes} bytes.", param="data")
        principal = self._principal(authorization)
        principal.require("jobs")
        submission = JobSubmission(
            principal=principal,
            body=bytes(event.data),
            priority=event.causewaypriority or "bulk",
            tags=read_tags(event.causewaytags, "causewaytags"),
        )
        _refuse_job_fields(submission.body)
        job = await self.parser.parse(submission, int(self.clock() * 1000), self.callers.limits(principal))
        check_region(regions_of(job.tags), self.config.region, "the broker (streams.region)")
        return job

    def _principal(self, authorization: str) -> Principal:
        if authorization or self.config.tenant is None:
            return self.callers.identify(authorization)
        return Principal(self.config.tenant, _DEVICE, frozenset({"jobs"}), Grants(priority=self.config.priority))


def _refuse_job_fields(body: bytes) -> None:
    """Refuse fields of a job that the event of a message has elsewhere. Raises InvalidRequest."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the parser says what is wrong
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name, reason in _JOB_ONLY.items():
            if bytes(fields.get(name, b"null")) != b"null":
                raise InvalidRequest(f"A message must not have `{name}`: {reason}.", param=name)
