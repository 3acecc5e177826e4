"""Payload and signature of a delivery, by the Standard Webhooks specification.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from standardwebhooks import Webhook


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery that is due. It carries no content: the receiver fetches the job."""

    id: str  # the same in each attempt: the receiver's idempotency key
    job: str
    owner: str
    url: str
    state: str  # of the job
    finished: int  # unix ms
    attempts: int  # made before
    fence: int
    claimed: int  # unix ms, when this attempt began, by Redis's clock
    traceparent: str = ""


class _PayloadJob(msgspec.Struct):
    id: str
    status: str
    object: str = "job"


class _Payload(msgspec.Struct):
    type: str
    timestamp: str
    data: _PayloadJob


def webhook_payload(delivery: WebhookDelivery) -> str:
    """Return the JSON body."""
    finished = datetime.fromtimestamp(delivery.finished / 1000.0, tz=UTC)
    timestamp = finished.isoformat().replace("+00:00", "Z")
    payload = _Payload(f"job.{delivery.state}", timestamp, _PayloadJob(delivery.job, delivery.state))
    return msgspec.json.encode(payload).decode()


def signed_headers(delivery: WebhookDelivery, body: str, secrets: tuple[str, ...], now_s: float) -> dict[str, str]:
    """Return the headers, with one signature per valid secret. `now_s` is unix time."""
    timestamp = datetime.fromtimestamp(int(now_s), tz=UTC)
    return {
        "content-type": "application/json",
        "webhook-id": f"msg_{delivery.id}",
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(
            Webhook(secret).sign(f"msg_{delivery.id}", timestamp, body) for secret in secrets
        ),
    }
