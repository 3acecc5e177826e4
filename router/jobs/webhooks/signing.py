"""The signature of a delivery by the Standard Webhooks specification.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from standardwebhooks import Webhook


def signed_headers(message_id: str, body: str, secrets: Iterable[str], now_s: float) -> dict[str, str]:
    """Return the headers of the signature, with one signature per valid secret. `now_s` is unix time."""
    timestamp = datetime.fromtimestamp(int(now_s), tz=UTC)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(Webhook(secret).sign(message_id, timestamp, body) for secret in secrets),
    }
