"""Lines of output and error files, in OpenAI's format. Pure."""

from __future__ import annotations

import msgspec

from router.errors import CausewayError
from router.jobs.states import JobState

from ..storage.batches.batch_store import Batch, LineOutcome, ResultPart, batch_job_id


class _LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(msgspec.Struct):
    code: str
    message: str


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _LineResponse | None
    error: _LineError | None


_NOT_RUN_CODES = {JobState.CANCELLED: "batch_cancelled", JobState.EXPIRED: "batch_expired", None: "batch_expired"}


def output_line(batch: Batch, line: int, outcome: LineOutcome) -> tuple[ResultPart, bytes]:
    """Return a line of the output file (a succeeded job) or of the error file (any other)."""
    job = batch_job_id(batch.id, line)
    if outcome.state is JobState.SUCCEEDED:
        response = _LineResponse(200, job, msgspec.Raw(outcome.result))
        row = _OutputLine(f"batch_req_{job}", outcome.custom_id, response, None)
        return "output", msgspec.json.encode(row) + b"\n"
    row = _OutputLine(f"batch_req_{job}", outcome.custom_id, None, _error(batch, outcome))
    return "errors", msgspec.json.encode(row) + b"\n"


def _error(batch: Batch, outcome: LineOutcome) -> _LineError:
    not_run = _NOT_RUN_CODES.get(outcome.state)
    # A job may also be cancelled for a reason of its own, such as a revoked token.
    own_reason = outcome.state is JobState.CANCELLED and batch.cancelling_at is None and outcome.error
    if not_run is not None and not own_reason:
        if outcome.state is None and batch.cancelling_at is not None:
            not_run = "batch_cancelled"
        return _LineError(not_run, "This request was not completed before the batch ended.")
    try:
        return msgspec.json.decode(outcome.error, type=_LineError)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _LineError(CausewayError.code, "")
