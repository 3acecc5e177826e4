"""The body of a delivery, with the headers that say what it is: Standard Webhooks' own form, or a CloudEvent.

Sources: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md and, for CloudEvents
1.0, https://github.com/cloudevents/spec (formats/json-format.md, bindings/http-protocol-binding.md).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from ..config import WebhookFormat
from .signing import WebhookDelivery

_JSON: Final = "application/json"
CLOUD_EVENT_JSON: Final = "application/cloudevents+json"
_SOURCE: Final = "/causeway/jobs"


class EndedJob(msgspec.Struct, frozen=True):
    """What a delivery tells of its job; the receiver fetches the rest."""

    id: str
    status: str
    object: str = "job"
    revision: int = 0  # of the answer


class StandardPayload(msgspec.Struct, frozen=True):
    """The body as Standard Webhooks suggest it."""

    type: str
    timestamp: str
    data: EndedJob


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The body as a CloudEvent in structured mode."""

    specversion: Literal["1.0"] = "1.0"
    id: str
    source: str
    type: str
    subject: str
    time: str
    datacontenttype: str = _JSON
    data: EndedJob


def webhook_payload(delivery: WebhookDelivery, form: WebhookFormat) -> tuple[str, dict[str, str]]:
    """Return the body and the headers that describe it."""
    finished = datetime.fromtimestamp(delivery.finished / 1000.0, tz=UTC)
    time = finished.isoformat().replace("+00:00", "Z")
    data = EndedJob(delivery.job, delivery.state, revision=delivery.revision)
    kind = f"job.{delivery.event or delivery.state}"
    if form == "standard":
        return _encoded(StandardPayload(kind, time, data)), {"content-type": _JSON}
    event = JobEvent(
        id=delivery.message_id, source=_SOURCE, type=f"causeway.{kind}", subject=delivery.job, time=time, data=data
    )
    if form == "cloudevents":
        return _encoded(event), {"content-type": CLOUD_EVENT_JSON}
    attributes = {name: getattr(event, name) for name in ("specversion", "id", "source", "type", "subject", "time")}
    return _encoded(data), {"content-type": _JSON, **{f"ce-{name}": value for name, value in attributes.items()}}


def _encoded(body: msgspec.Struct) -> str:
    return msgspec.json.encode(body).decode()
