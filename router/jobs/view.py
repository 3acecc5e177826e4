"""A job as HTTP shows it, at the gateway and on the device, and a plain request that becomes a job.

`Prefer: respond-async` (RFC 7240) makes a job of a request that takes longer than its client waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ..errors import CausewayError, JobCancelled, error_classes
from ..types import Modality

_LONGEST_WAIT_S = 300.0
_WAIT = re.compile(r'wait\s*=\s*"?([0-9]{1,6})"?', re.IGNORECASE)


class JobView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The body of `GET /v1/jobs/{id}`. Times are unix seconds; `error` is the inner object of an error.

    `revision`: which one of the answer `result` is. `late_parts`: kinds of part that may still revise it. `late_error`:
    why no further revision came.
    """

    id: str
    object: str = "job"
    status: str
    model: str
    priority: str
    endpoint: str
    created_at: int
    started_at: int | None
    finished_at: int | None
    deadline_at: int
    not_before_at: int | None
    attempts: int
    cache: str | None
    error: msgspec.Raw
    result: msgspec.Raw
    webhook: str | None
    webhook_status: str | None
    revision: int
    late_parts: tuple[Modality, ...]
    late_error: msgspec.Raw


class WebhookSecrets(msgspec.Struct):
    """The body of `/v1/webhooks/secret`. `previous` signs, too, for a time after the other was made."""

    secret: str
    previous: str | None
    object: str = "webhook.secret"


def encode_job_error(error: CausewayError) -> bytes:
    """Return the inner object of OpenAI's error as JSON."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode(fields)


def wait_of(headers: Iterable[str]) -> float | None:
    """Return the seconds that a client waits before it wants a job; None: it wants none.

    Without `wait` that is 0. Other preferences are ignored, as the RFC requires.
    """
    preferences = [part.strip() for header in headers for part in header.split(",")]
    if not any(part.partition(";")[0].strip().lower() == "respond-async" for part in preferences):
        return None
    waits = [float(match[1]) for part in preferences if (match := _WAIT.fullmatch(part))]
    return min(waits[0], _LONGEST_WAIT_S) if waits else 0.0


class JobFailed(CausewayError):
    """A job ended without an answer while its client waited. The code and the message are those of its error."""

    def __init__(self, state: str, error: bytes) -> None:
        """`error`: the stored error object, JSON; empty for a job that was cancelled."""
        found = msgspec.json.decode(error, type=_StoredError) if error else _StoredError()
        super().__init__(found.message or f"the job was {state}", param=found.param)
        kind = error_classes().get(found.code, CausewayError)
        self.status = kind.status  # type: ignore[misc]
        self.type = found.type  # type: ignore[misc]
        self.code = found.code  # type: ignore[misc]


class _StoredError(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = "server_error"
    code: str = JobCancelled.code
    param: str | None = None
