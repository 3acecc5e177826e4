"""The body of a delivery, with the headers that say what it is: Standard Webhooks' own form, or a CloudEvent.

Sources: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md and, for CloudEvents
1.0, https://github.com/cloudevents/spec (formats/json-format.md, bindings/http-protocol-binding.md).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

WebhookFormat = Literal["standard", "cloudevents", "cloudevents-binary"]
"""Standard Webhooks' own form, or a CloudEvent in structured or binary mode."""

_JSON: Final = "application/json"
CLOUD_EVENT_JSON: Final = "application/cloudevents+json"
_SOURCE: Final = "/causeway/jobs"


class JobNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a webhook. None has content: the receiver fetches the job."""

    id: str  # the same in each attempt: the receiver's idempotency key
    job: str
    state: str  # of the job
    event: str = ""  # what happened, if that is not its new state: `revised` or `not_revised`
    revision: int = 0  # of the answer
    finished: int  # unix ms

    @property
    def message_id(self) -> str:
        return f"msg_{self.id}"


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


class JobCloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The body as a CloudEvent in structured mode."""

    specversion: Literal["1.0"] = "1.0"
    id: str
    source: str
    type: str
    subject: str
    time: str
    datacontenttype: str = _JSON
    data: EndedJob


def webhook_payload(notice: JobNotice, form: WebhookFormat) -> tuple[str, dict[str, str]]:
    """Return the body and the headers that describe it."""
    finished = datetime.fromtimestamp(notice.finished / 1000.0, tz=UTC)
    time = finished.isoformat().replace("+00:00", "Z")
    data = EndedJob(notice.job, notice.state, revision=notice.revision)
    kind = f"job.{notice.event or notice.state}"
    if form == "standard":
        return _encoded(StandardPayload(kind, time, data)), {"content-type": _JSON}
    event = JobCloudEvent(
        id=notice.message_id, source=_SOURCE, type=f"causeway.{kind}", subject=notice.job, time=time, data=data
    )
    if form == "cloudevents":
        return _encoded(event), {"content-type": CLOUD_EVENT_JSON}
    attributes = {name: getattr(event, name) for name in ("specversion", "id", "source", "type", "subject", "time")}
    return _encoded(data), {"content-type": _JSON, **{f"ce-{name}": value for name, value in attributes.items()}}


def _encoded(body: msgspec.Struct) -> str:
    return msgspec.json.encode(body).decode()
