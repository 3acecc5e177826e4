"""The cloud's jobs as a device reads them: whether a server has any, a job's state, and its end."""

from __future__ import annotations

import contextlib

import aiohttp
import msgspec

from router.errors import CloudFailed, ModelNotFound
from router.jobs.states import JobEvent

from ..backend import BackendRequest, CloudJobEnded
from .response_reader import MAX_ERROR_BYTES, read_body

NO_JOBS = (403, 404, 405, 501)  # of a server that knows no jobs, or of a token that may send none
_ENDS = {
    "failed": JobEvent.FAIL,
    "dead": JobEvent.EXHAUST,
    "expired": JobEvent.EXPIRE,
    "cancelled": JobEvent.FAIL,
}


class CloudJob(msgspec.Struct, frozen=True):
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


def as_job(body: bytes, endpoint: str) -> bytes:
    """Return the body of a submission. It is the same at each try, as the cloud compares it under the key."""
    document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**document, "endpoint": endpoint})


async def check_no_jobs(response: aiohttp.ClientResponse, call: BackendRequest) -> None:
    """Check that a refusal means that this server has no jobs. Releases the response. Raises ModelNotFound."""
    body: bytes | None = None
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        body = await read_body(response, MAX_ERROR_BYTES)
    response.release()
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        error = msgspec.json.decode(body or b"", type=_Refused).error
        if error.code == ModelNotFound.code:
            raise ModelNotFound(f"{call.target.name}: {error.message[:500]}")


def read_job(body: bytes, call: BackendRequest) -> CloudJob:
    """Raises CloudFailed."""
    try:
        return msgspec.json.decode(body, type=CloudJob)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CloudFailed(f"{call.target.name} answered with something that is no job", phase="stream") from None


def end_of(job: CloudJob) -> CloudJobEnded | None:
    """How the job ended without an answer; None while it waits or runs."""
    event = _ENDS.get(job.status)
    if event is None:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        code = msgspec.json.decode(job.error, type=_Named).code
        return CloudJobEnded(event, bytes(job.error), f"the cloud ended the job: {job.status} ({code})")
    return CloudJobEnded(event, bytes(job.error), f"the cloud ended the job: {job.status}")
