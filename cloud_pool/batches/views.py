"""OpenAI's file and batch objects. Times are unix seconds."""

from __future__ import annotations

import msgspec

from router.api.files import FileView

from ..storage.batches.batch_store import COMPLETION_WINDOW, Batch
from ..storage.batches.states import BatchState
from ..storage.files.file_store import StoredFile
from .input_file import BatchLineError


class _RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class _InputErrors(msgspec.Struct):
    data: list[BatchLineError]
    object: str = "list"


class BatchView(msgspec.Struct, kw_only=True):
    """OpenAI's batch object."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: _InputErrors | None
    input_file_id: str
    completion_window: str = COMPLETION_WINDOW
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: _RequestCounts
    metadata: msgspec.Raw


def file_view(file: StoredFile) -> FileView:
    """Return what the API shows of a file."""
    return FileView(file.id, file.bytes, file.created // 1000, file.expires // 1000, file.filename, file.purpose)


def batch_view(batch: Batch) -> BatchView:
    """Return what the API shows of a batch."""
    errors = None
    if batch.line_errors:
        errors = _InputErrors(msgspec.json.decode(batch.line_errors, type=list[BatchLineError]))
    return BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=errors,
        input_file_id=batch.input,
        status=batch.state,
        output_file_id=batch.output or None,
        error_file_id=batch.errors or None,
        created_at=batch.created // 1000,
        in_progress_at=_seconds(batch.in_progress_at),
        expires_at=batch.expires // 1000,
        finalizing_at=_seconds(batch.finalizing_at),
        completed_at=_seconds(batch.completed_at),
        failed_at=_seconds(batch.failed_at),
        expired_at=_seconds(batch.expired_at),
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=_seconds(batch.cancelled_at),
        request_counts=_RequestCounts(batch.total, batch.completed, batch.failed),
        metadata=msgspec.Raw(batch.metadata.encode()),
    )


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
