"""Errors that only jobs of a device have: leaves of the tree in router.errors."""

from __future__ import annotations

import msgspec

from router.errors import CausewayError, InvalidRequest, QueueFull


class OutboxFull(QueueFull):
    """The device holds as many jobs, or as many bytes of them, as it may."""

    code = "outbox_full"


class JobNotDead(InvalidRequest):
    """Only a dead letter can be retried."""

    status = 409
    code = "job_not_dead"


class JobNotEnded(InvalidRequest):
    """A job that has not ended is cancelled, not purged."""

    status = 409
    code = "job_not_ended"


class JobFailed(CausewayError):
    """A job ended without an answer while its client waited. The code and the message are those of its error."""

    def __init__(self, state: str, error: bytes) -> None:
        """`error`: the stored error object, JSON; empty for a job that was cancelled."""
        found = msgspec.json.decode(error, type=_Stored) if error else _Stored()
        super().__init__(found.message or f"the job was {state}", param=found.param)
        kind = _kinds().get(found.code, CausewayError)
        self.status = kind.status  # type: ignore[misc]
        self.type = found.type  # type: ignore[misc]
        self.code = found.code  # type: ignore[misc]


class _Stored(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = "server_error"
    code: str = "job_cancelled"
    param: str | None = None


def _kinds() -> dict[str, type[CausewayError]]:
    """Every error of the tree, by its code."""
    found: dict[str, type[CausewayError]] = {}
    kinds = [CausewayError]
    while kinds:
        kind = kinds.pop()
        found.setdefault(kind.code, kind)
        kinds += kind.__subclasses__()
    return found


class JobDropped(CausewayError):
    """A bulk job that waited gave way to a newer job, because the outbox was full."""

    status = 503
    code = "job_dropped"


class JobLost(CausewayError):
    """The daemon ended during each of many runs of the job."""

    code = "daemon_lost"


class ResultTooLarge(InvalidRequest):
    """The answer is larger than `jobs.max_result_bytes`; another attempt would not change that."""

    status = 422
    code = "answer_too_large"
