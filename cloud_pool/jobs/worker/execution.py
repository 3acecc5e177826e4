"""One run of a claimed job: its stored request -> chunks -> the body of OpenAI's answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import anyio
import msgspec

from router.errors import CausewayError, DeadlineExceeded, ResultTooLarge
from router.jobs.submission import encode_job_answer, parse_job_request
from router.parts.reading import text_bytes
from router.serving.logs import redacted
from router.types import Chunk, Embeddings, Modality, Request, RoutingHints

from ...cache.caching_service import STATUS_HEADER
from ...core.request_context import AnswerHead
from ...storage.record import JobRecord
from .runner import JobRun, JobRunner, RunReceipt

if TYPE_CHECKING:
    from ...core.late import LateReading

_PROGRESS_INTERVAL_S = 1.0
_log = logging.getLogger("causeway.cloud.jobs")
ReportProgress = Callable[[bytes], Awaitable[None]]
"""Gets a Progress as JSON."""


class RunProgress(msgspec.Struct, frozen=True):
    """Data of a progress event."""

    tokens: int


class JobResult(msgspec.Struct, frozen=True):
    """An answer. `cache` is the outcome of the shared cache; "" without one.

    `late`: kinds of part that may revise it. `late_error`: why it is not revised.
    """

    body: bytes
    cache: str = ""
    late: tuple[Modality, ...] = ()
    late_error: CausewayError | None = None


def job_run_of(
    record: JobRecord,
    deadline: float,
    receipt: RunReceipt | None = None,
    price_share: float = 1.0,
    late: LateReading | None = None,
) -> JobRun:
    """Return a run of a job, with its request as it was sent. Raises InvalidRequest.

    Args:
        deadline: of this run, monotonic s
        receipt, price_share, late: as in `execute`
    """
    hints = RoutingHints(client=record.owner, tags=record.tag_list)
    request = parse_job_request(record.endpoint, record.body, hints)
    return JobRun(
        id=record.id,
        owner=record.owner,
        body_bytes=text_bytes(request, len(record.body)),
        request=request,
        tier=record.tier,
        priority=record.priority,
        deadline=deadline,
        attempt=record.attempts,
        traceparent=record.traceparent,
        fence=record.fence,
        receipt=receipt or RunReceipt(),
        token_id=record.token_id,
        token_issued=record.token_issued,
        price_share=price_share,
        late=late,
    )


async def execute(
    record: JobRecord,
    runner: JobRunner,
    report_progress: ReportProgress,
    *,
    left_s: float,
    max_bytes: int,
    created: int,
    receipt: RunReceipt,
    on_text: Callable[[str], None] = lambda _: None,
    price_share: float = 1.0,
    late: LateReading | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> JobResult | CausewayError:
    """Run a job and return its answer or its error. Raises nothing but cancellation.

    Args:
        left_s: time for this run
        max_bytes: of the answer's body
        created: unix s, written into the answer
        receipt: gets what the run has cost
        on_text: gets each part of the text, of an answer that is a single text
        price_share: of the tier's price
        late: reads the request's parts; None: its answer is not revised
        clock: monotonic time, s
    """
    try:
        with anyio.fail_after(left_s):
            job_run = job_run_of(record, clock() + left_s, receipt, price_share, late)
            cache, answer = await _collect(runner, job_run, report_progress, on_text, clock)
    except TimeoutError:
        return DeadlineExceeded("the time for this run is over")
    except CausewayError as error:
        return error
    except Exception as error:
        _log.error("%s: a run failed unexpectedly: %s", record.id, redacted(error))
        return CausewayError("The worker failed.")
    body = _encode(record, job_run.request, answer, max_bytes, created)
    return JobResult(body, cache) if isinstance(body, bytes) else body


async def _collect(
    runner: JobRunner,
    job_run: JobRun,
    report_progress: ReportProgress,
    on_text: Callable[[str], None],
    clock: Callable[[], float],
) -> tuple[str, list[Chunk] | Embeddings]:
    cache, chunks, vectors = "", list[Chunk](), None
    tokens, reported_at = 0, clock()
    has_one_text = job_run.request.sequences == 1
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
            if has_one_text and piece.text:
                on_text(piece.text)
            if clock() - reported_at >= _PROGRESS_INTERVAL_S:
                reported_at = clock()
                await report_progress(msgspec.json.encode(RunProgress(tokens)))
    return cache, chunks if vectors is None else vectors


def _encode(
    record: JobRecord, request: Request, answer: list[Chunk] | Embeddings, max_bytes: int, created: int
) -> bytes | CausewayError:
    try:
        body = encode_job_answer(record.endpoint, record.body, request, record.id, record.tier, created, answer)
    except CausewayError as error:
        return error
    if len(body) > max_bytes:
        return ResultTooLarge(f"The answer is larger than {max_bytes} bytes. Ask for fewer tokens.")
    return body
