"""A delivery, and its signature by the Standard Webhooks specification.

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
    event: str = ""  # what happened, if that is not its new state: `revised` or `not_revised`
    revision: int = 0  # of the answer
    finished: int  # unix ms
    attempts: int  # made before
    fence: int
    claimed: int  # unix ms, when this attempt began, by Redis's clock
    traceparent: str = ""

    @property
    def message_id(self) -> str:
        return f"msg_{self.id}"


def signed_headers(delivery: WebhookDelivery, body: str, secrets: tuple[str, ...], now_s: float) -> dict[str, str]:
    """Return the headers of the signature, with one signature per valid secret. `now_s` is unix time."""
    timestamp = datetime.fromtimestamp(int(now_s), tz=UTC)
    return {
        "webhook-id": delivery.message_id,
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(Webhook(secret).sign(delivery.message_id, timestamp, body) for secret in secrets),
    }
