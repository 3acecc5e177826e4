"""Webhooks of jobs, for gateway and device: their payload, their signature, the retries of a delivery, and the
permitted receivers. Pure.

The payload has Standard Webhooks' own form. Source:
https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

The receiver is checked by its URL at submission, and by its addresses at connect time:

1. An address that embeds any IPv4 address (mapped, compatible, NAT64, 6to4, Teredo) is refused: a translator on the
network path could turn it into a private one.
2. Link-local, loopback, private, shared, multicast, reserved and documentation ranges are refused.
3. `allowed_networks` overrides both, for private deployments and tests.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError, InvalidRequest


class JobNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a webhook. It contains no prompt or answer: the receiver fetches the job."""

    id: str  # the same in each attempt, as the receiver's idempotency key
    job: str
    state: str  # state of the job
    finished: int  # Unix milliseconds

    @property
    def message_id(self) -> str:
        return f"msg_{self.id}"


class EndedJob(msgspec.Struct, frozen=True):
    """The fields of a job in a delivery; the receiver fetches the rest."""

    id: str
    status: str
    object: str = "job"


class StandardPayload(msgspec.Struct, frozen=True):
    """The body in the form that Standard Webhooks suggests."""

    type: str
    timestamp: str
    data: EndedJob


def webhook_payload(notice: JobNotice) -> str:
    """Return the body, JSON."""
    finished = datetime.fromtimestamp(notice.finished / 1000.0, tz=UTC)
    time = finished.isoformat().replace("+00:00", "Z")
    payload = StandardPayload(f"job.{notice.state}", time, EndedJob(notice.job, notice.state))
    return msgspec.json.encode(payload).decode()


RETRY_DELAYS_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Delays between attempts in seconds, as Standard Webhooks suggests. After the last attempt a delivery has failed.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""
_JITTER = 0.2


def webhook_retry_delay_s(attempts: int, draw: float) -> float | None:
    """Return the delay after `attempts` ≥ 1 failed attempts, ± 20 %, or None to give up. `draw` is in [0, 1)."""
    if attempts > len(RETRY_DELAYS_S):
        return None
    return RETRY_DELAYS_S[attempts - 1] * (1.0 + _JITTER * (2.0 * draw - 1.0))


def signed_headers(message_id: str, body: str, secrets: Iterable[str], now_s: float) -> dict[str, str]:
    """Return the headers of a delivery, with a signature per valid secret. `now_s` is unix time."""
    from standardwebhooks import Webhook  # imported only for the first webhook

    timestamp = datetime.fromtimestamp(int(now_s), tz=UTC)
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": " ".join(Webhook(secret).sign(message_id, timestamp, body) for secret in secrets),
    }


MAX_URL = 2048  # characters
_NO_ADDRESS = "is not an address"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_EMBEDDING: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "::ffff:0:0/96",  # mapped
        "::ffff:0:0:0/96",  # translated, RFC 2765
        "::/96",  # compatible
        "64:ff9b::/96",  # NAT64, RFC 6052
        "64:ff9b:1::/48",  # NAT64 of a site, RFC 8215
        "2002::/16",  # 6to4
        "2001::/32",  # Teredo
    )
)
_OTHER: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; Python's patch level decides which of them count as global
        "2001::/23",
        "3fff::/20",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # Azure's host: public by its number only
        "fec0::/10",  # site-local, deprecated but routed in old networks
        "5f00::/16",  # segment routing
    )
)


class WebhookRefused(InvalidRequest, code="webhook_refused"):
    """Webhooks may not be sent to this URL."""


def allowed_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of `jobs.webhooks.allowed_networks`. Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigError(str(error), where="jobs.webhooks.allowed_networks") from error


def check_webhook_url(url: str, *, allow_http: bool, allowed: tuple[Network, ...]) -> str:
    """Return `url` if webhooks may be sent to it, as far as can be decided before DNS. Raises WebhookRefused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise WebhookRefused("`webhook` is not a URL.", param="webhook") from None
    if len(url) > MAX_URL or not host or not url.isascii() or not url.isprintable() or " " in url or port == 0:
        raise WebhookRefused(f"`webhook` must be a URL of at most {MAX_URL} ASCII characters.", param="webhook")
    if parts.scheme != "https" and not (allow_http and parts.scheme == "http"):
        schemes = "http:// or https://" if allow_http else "https://"
        raise WebhookRefused(f"`webhook` must begin with {schemes}.", param="webhook")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise WebhookRefused("`webhook` must not contain a user, password or fragment.", param="webhook")
    reason = forbidden_reason(host, allowed)
    if reason and reason != _NO_ADDRESS:
        raise WebhookRefused(
            f"`webhook` may not be sent to {host}: it {reason}. Name a public host, or ask the operator "
            "to allow its network (jobs.webhooks.allowed_networks).",
            param="webhook",
        )
    return url


def forbidden_reason(text: str, allowed: tuple[Network, ...] = ()) -> str:
    """Return why webhooks to this address are forbidden; "" if they are allowed. Other texts are refused."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return _NO_ADDRESS
    if any(address in network for network in allowed):  # (3)
        return ""
    if any(address in network for network in _EMBEDDING):  # (1)
        return "embeds an IPv4 address"
    return _special_range(address)


def _special_range(address: Address) -> str:  # (2)
    if address.is_multicast:
        return "is multicast"
    if address.is_loopback:
        return "is loopback"
    if address.is_link_local:
        return "is link-local"
    if not address.is_global or address.is_reserved or any(address in network for network in _OTHER):
        return "is private or reserved"
    return ""
