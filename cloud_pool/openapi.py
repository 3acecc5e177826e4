"""The gateway's OpenAPI document, built when a client first asks for it."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from typing import Any, Literal

from causeway_server.router.api.document import Operation, openapi_document
from causeway_server.router.api.operations import SHARED_TYPES, by_name, file_upload
from causeway_server.router.api.reader import Api, read_api
from causeway_server.router.jobs.job import JobView
from causeway_server.router.jobs.submission import JobFields
from causeway_server.router.jobs.webhooks import WebhookRefused

from .accounts.identity.api_keys import NewApiKey, Rotation
from .batches.batch_api import BatchList, BatchRequest, BatchView, UploadPurpose
from .erasure import ErasureConflict, SignedReceipt
from .http.key_routes import ApiKeyDeleted, ApiKeyList, ApiKeyView
from .jobs.http.job_api import JobList, WebhookDisabled
from .jobs.worker.runner import TokenRevoked
from .storage.durability import JobStoreIsCluster, JobStoreNotDurable
from .storage.encryption import ContentKeyMissing
from .storage.file_contents import FileContentLost, FileStoreUnavailable, FileTooLarge
from .storage.file_store import QuotaExceeded
from .storage.redis_client import JobStoreLayoutMismatch, JobStoreNotReplicated

_TYPES = {
    **SHARED_TYPES,
    **by_name(ApiKeyDeleted, ApiKeyList, ApiKeyView, BatchList, BatchRequest, BatchView, JobFields),
    **by_name(ContentKeyMissing, ErasureConflict, FileContentLost, FileStoreUnavailable, FileTooLarge, JobList),
    **by_name(JobStoreIsCluster, JobStoreLayoutMismatch, JobStoreNotDurable, JobStoreNotReplicated, NewApiKey),
    **by_name(QuotaExceeded, Rotation, SignedReceipt, TokenRevoked, WebhookDisabled, WebhookRefused),
    **by_name(file_upload(UploadPurpose)),
    "Job": JobView,
    "Truth": Literal["true", "false"],
}


def gateway_document(served: Collection[str] | None = None) -> dict[str, Any]:
    """Build the document of the `served` paths; None: all (without a Redis a gateway has no jobs)."""
    api = _api()
    return openapi_document(
        "Causeway gateway",
        version("causeway-router"),
        [operation for operation in api.operations if served is None or operation.path in served],
        {"description": "A static or a signed token; a gateway on loopback may need none."},
        token_optional=True,
        webhooks=api.webhooks if served is None or "/v1/jobs" in served else [],
        schemas=api.schemas,
    )


def gateway_operations() -> list[Operation]:
    """Return every operation of the public address of a fully configured gateway."""
    return _api().operations


def _api() -> Api:
    text = read_api("causeway_server.router.api", "operations.yaml").joined(read_api(__package__, "openapi.yaml"))
    return Api(text, _TYPES, {"files": "jobs or chat"})
