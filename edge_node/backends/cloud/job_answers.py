"""A request as a job of the cloud: submitted, looked at until it ends, its answer or its end.

A server is taken for one without jobs once it has refused them for some seconds, and for minutes if it took one before:
a gateway behind a proxy may answer 404 for a moment, and a plain request is not done exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import aiohttp
import msgspec
from yarl import URL

from router.decision.attempts import split_token
from router.errors import ClientGone, CloudSaturated, CloudUnreadable, ModelNotFound
from router.jobs.states import JobEvent
from router.openai import encode_request

from ..backend import BackendRequest, CloudJobEnded, JobTerms
from .connection import PATHS, CloudConnection
from .response_reader import MAX_ERROR_BYTES, read_body, read_error, read_whole

_NO_JOBS_S = 600.0  # then a server without jobs is asked for them again
_SURE_S, _SURE_AFTER_JOBS_S = 5.0, 600.0  # of refusals, until a server counts as one without jobs
_AGAIN_S = 2.0  # until a refused submission is tried again
_POLL_S, _LONGEST_POLL_S, _POLL_GROWTH = 0.2, 5.0, 1.5  # pauses between looks at a job
_NO_JOBS = (403, 404, 405, 501)  # of a server that knows no jobs, or of a token that may send none
_ASK_AGAIN = (401, 408, 429)
Cancelled = Literal["settled", "unknown", "later"]
"""The cloud's answer to a cancellation. settled: nothing is left to do; later: it must be sent again."""
_ENDS = {
    "failed": JobEvent.FAIL,
    "dead": JobEvent.EXHAUST,
    "expired": JobEvent.EXPIRE,
    "cancelled": JobEvent.FAIL,
}


class CloudJobs:
    """Sends requests as jobs: the cloud does each once, however often it is sent.

    Args:
        url: of the server.
        now: the clock, monotonic seconds.
    """

    def __init__(self, url: str, connection: CloudConnection, now: Callable[[], float]) -> None:
        self._url = URL(url + "/jobs")
        self._connection = connection
        self._now = now
        self._none_until = float("-inf")
        self._refused_since: float | None = None
        self._had_jobs = False

    async def answer(self, call: BackendRequest, job: JobTerms) -> bytes | None:
        """Send the request as a job, and wait for its answer. None: this server has no jobs."""
        if self._now() < self._none_until:
            return None
        if not await job.pin(call.target.name):
            raise ClientGone("the job was cancelled")
        state = await self._submit(call, job)
        # The reply to a submission has no result, also where the key finds a job that has ended.
        pause_s = 0.0 if state is not None and state.ended else _POLL_S
        while state is not None:
            await asyncio.sleep(min(pause_s, max(0.0, call.deadline - self._now())))
            pause_s = min(_LONGEST_POLL_S, max(_POLL_S, pause_s * _POLL_GROWTH))
            response = await self._connection.send(call, "GET", self._url / state.id, call.deadline)
            state = await self._read_job(call, response)
            if state.status == "succeeded":
                return bytes(state.result)
            if (error := _end_of(state)) is not None:
                raise error
        return None

    async def cancel(self, key: str) -> Cancelled:
        """Cancel the job of this key."""
        status = await self._connection.command("DELETE", self._url, {"Idempotency-Key": key})
        if status == 404:
            return "unknown"
        is_final = status is not None and status not in _ASK_AGAIN and (status < 500 or status in _NO_JOBS)
        return "settled" if is_final else "later"

    async def _submit(self, call: BackendRequest, job: JobTerms) -> _CloudJob | None:
        """The job of this key, new or known. None: this server has no jobs."""
        resume = split_token(call.request.resume)[1]
        plain = encode_request(call.request, call.target.model, stream=False, resume=resume)
        body = _as_job(plain, "/v1" + PATHS[call.request.kind])
        headers = {"Idempotency-Key": job.key, "x-causeway-priority": job.priority}
        response = await self._connection.send(call, "POST", self._url, call.deadline, body=body, headers=headers)
        if response.status in _NO_JOBS:
            await _check_no_jobs(response, call)
            self._note_refusal(call, response.status)
            return None
        state = await self._read_job(call, response)
        self._had_jobs, self._refused_since = True, None
        return state

    def _note_refusal(self, call: BackendRequest, status: int) -> None:
        """Return if the server has no jobs, for all that is known. Raises CloudSaturated: ask it again."""
        now = self._now()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since < (_SURE_AFTER_JOBS_S if self._had_jobs else _SURE_S):
            raise CloudSaturated(
                f"{call.target.name} answered HTTP {status} to /jobs: the job waits until that is certain",
                phase="first_token",
                retry_after_s=_AGAIN_S,
            )
        self._none_until = now + _NO_JOBS_S

    async def _read_job(self, call: BackendRequest, response: aiohttp.ClientResponse) -> _CloudJob:
        if response.status not in (200, 202):
            raise await read_error(response, call, call.deadline)
        try:
            return _read(await read_whole(response, call), call)
        finally:
            response.release()


class _CloudJob(msgspec.Struct, frozen=True):
    """What a device reads of a job in the cloud."""

    id: str
    status: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def ended(self) -> bool:
        return self.status == "succeeded" or self.status in _ENDS


class _Named(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Refused(msgspec.Struct):
    error: _Named


def _as_job(body: bytes, endpoint: str) -> bytes:
    """Return the body of a submission. It is the same at each try, as the cloud compares it under the key."""
    document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**document, "endpoint": endpoint})


async def _check_no_jobs(response: aiohttp.ClientResponse, call: BackendRequest) -> None:
    """Check that a refusal means that this server has no jobs. Releases the response. Raises ModelNotFound."""
    body: bytes | None = None
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        body = await read_body(response, MAX_ERROR_BYTES)
    response.release()
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = msgspec.json.decode(body or b"", type=_Refused).error
        if error.code == ModelNotFound.code:
            raise ModelNotFound(f"{call.target.name}: {error.message[:500]}")


def _read(body: bytes, call: BackendRequest) -> _CloudJob:
    """Raises CloudUnreadable."""
    try:
        return msgspec.json.decode(body, type=_CloudJob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CloudUnreadable(f"{call.target.name} answered with something that is not a job", phase="stream") from None


def _end_of(job: _CloudJob) -> CloudJobEnded | None:
    """How the job ended without an answer; None while it waits or runs."""
    event = _ENDS.get(job.status)
    if event is None:
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        code = msgspec.json.decode(job.error, type=_Named).code
        return CloudJobEnded(event, bytes(job.error), f"the cloud ended the job: {job.status} ({code})")
    return CloudJobEnded(event, bytes(job.error), f"the cloud ended the job: {job.status}")
