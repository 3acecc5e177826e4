"""One run of a claimed job: its stored request → pieces → OpenAI's body."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import anyio
import msgspec

from router.errors import CausewayError, DeadlineExceeded
from router.openai import AnswerEncoder, coalesce, parse_chat, parse_completion
from router.types import Chunk, Request, RoutingHints

from ...cache.single_flight.reply import STATUS_HEADER
from ...serving.request_context import AnswerHead
from ..errors import ResultTooLarge
from ..record import Endpoint, JobRecord
from .runner import JobRun, JobRunner

_PROGRESS_INTERVAL_S = 1.0
_log = logging.getLogger("causeway.cloud.jobs")
ReportProgress = Callable[[bytes], Awaitable[None]]


class Progress(msgspec.Struct, frozen=True):
    tokens: int


class JobResult(msgspec.Struct, frozen=True):
    """`cache`: what the shared cache did; "" where there is none."""

    body: bytes
    cache: str = ""


def parse_request(endpoint: Endpoint, body: bytes, owner: str, tags: tuple[str, ...] = ()) -> Request:
    """`tags` are those of the headers that came with the body, which may have its own. Raises InvalidRequest."""
    parse = parse_chat if endpoint == "/v1/chat/completions" else parse_completion
    return parse(body, RoutingHints(client=owner, tags=tags))


async def attempt(
    record: JobRecord,
    runner: JobRunner,
    note: ReportProgress,
    *,
    left_s: float,
    max_bytes: int,
    created: int,
    clock: Callable[[], float] = time.monotonic,
) -> JobResult | CausewayError:
    """The answer, or why there is none. Only cancellation comes out as an exception."""
    try:
        with anyio.fail_after(left_s):
            request = parse_request(record.endpoint, record.body, record.owner, record.tagged)
            job_run = JobRun(
                id=record.id,
                owner=record.owner,
                body_bytes=len(record.body),
                request=request,
                tier=record.tier,
                priority=record.priority,
                deadline=clock() + left_s,
                attempt=record.attempts,
                traceparent=record.traceparent,
            )
            cache, chunks = await _collect(runner, job_run, note, clock)
    except TimeoutError:
        return DeadlineExceeded("the time for this run is over")
    except CausewayError as error:
        return error
    except Exception as error:
        _log.error("%s: a run failed unexpectedly: %s", record.id, _error_location(error))
        return CausewayError("The worker failed.")
    body = _encoded(record, request, chunks, max_bytes, created)
    return JobResult(body, cache) if isinstance(body, bytes) else body


async def _collect(
    runner: JobRunner, job_run: JobRun, note: ReportProgress, clock: Callable[[], float]
) -> tuple[str, list[Chunk]]:
    cache, found = "", list[Chunk]()
    tokens, noted_at = 0, clock()
    async with aclosing(runner.run(job_run)) as pieces:
        async for piece in pieces:
            if isinstance(piece, AnswerHead):
                cache = dict(piece.headers).get(STATUS_HEADER, "")
                continue
            found.append(piece)
            tokens += piece.tokens
            if clock() - noted_at >= _PROGRESS_INTERVAL_S:
                noted_at = clock()
                await note(msgspec.json.encode(Progress(tokens)))
    return cache, found


def _encoded(
    record: JobRecord, request: Request, chunks: list[Chunk], max_bytes: int, created: int
) -> bytes | CausewayError:
    prefix = "chatcmpl" if request.kind == "chat" else "cmpl"
    try:
        body = AnswerEncoder(request, f"{prefix}-{record.id}", record.tier, created).whole(*coalesce(chunks))
    except CausewayError as error:
        return error
    if len(body) > max_bytes:
        return ResultTooLarge(f"The answer is larger than {max_bytes} bytes. Ask for fewer tokens.")
    return body


def _error_location(error: Exception) -> str:
    """The class and the line, without the message: that may quote what was asked."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
