"""The operations of webhooks, of both daemons."""

from __future__ import annotations

from collections.abc import Iterator

from .. import errors
from ..jobs.view import WebhookSecrets
from ..jobs.webhooks import CLOUD_EVENT_JSON, EndedJob, JobCloudEvent, StandardPayload
from .generation import Errors
from .operation import JSON, AnyOf, ApiResponse, Operation, Parameter

SECRET_PATH = "/v1/webhooks/secret"


def secret_operations(caller: str, more_errors: Errors) -> Iterator[Operation]:
    """Yield what reads and rotates a caller's secrets."""
    found = (ApiResponse(200, {JSON: WebhookSecrets}),)
    summary = "The secrets that sign the caller's webhooks."
    yield Operation(method="GET", path=SECRET_PATH, summary=summary, caller=caller, responses=found, errors=more_errors)
    summary, limited = "Make a new secret; the old one signs, too, for a time.", (*more_errors, errors.RateLimited)
    yield Operation(method="POST", path=SECRET_PATH, summary=summary, caller=caller, responses=found, errors=limited)


def job_ended_operation() -> Operation:
    """Return what is sent to the `webhook` of a job; `jobs.webhooks.format` chooses the body."""
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    binary = ("ce-specversion", "ce-id", "ce-source", "ce-type", "ce-subject", "ce-time")
    signature = [Parameter(name, "By the Standard Webhooks specification.", "header", required=True) for name in names]
    attributes = [Parameter(name, "Of a CloudEvent in binary mode, whose body is `data`.", "header") for name in binary]
    return Operation(
        method="POST",
        path="job.ended",
        summary="A job has ended.",
        request={JSON: AnyOf((StandardPayload, EndedJob)), CLOUD_EVENT_JSON: JobCloudEvent},
        parameters=(*signature, *attributes),
        responses=(ApiResponse(200, meaning="Any 2xx: delivered. 410: disabled. All else is repeated."),),
    )
