"""A job as `GET /v1/jobs/{id}` shows it, at the gateway and on the device."""

from __future__ import annotations

import msgspec

from ..errors import CausewayError
from ..types import Modality


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
