"""A caller's body → an offer: what the endpoint takes, and beside it `priority`, `deadline_ms`, `webhook`, `endpoint`.

The fields of ours are taken out before the request is kept: what is left is a plain OpenAI request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping

import msgspec

from router.errors import InvalidRequest, ModelNotFound
from router.types import Request

from ..accounts.tenants.config import TenantLimits
from ..admission import Priority
from ..config.tiers import Tier
from ..serving.service import check_supported
from .config import JobsConfig
from .record import Endpoint, NewJob
from .webhooks.address import Network
from .webhooks.outbox import MAX_URL, check_webhook_url
from .worker.execution import parse_request

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_EXTENSION_FIELDS = ("priority", "deadline_ms", "webhook", "endpoint")


class _ExtensionFields(msgspec.Struct, frozen=True):
    priority: Priority | None = None
    deadline_ms: int | None = None
    webhook: str = ""
    endpoint: Endpoint = "/v1/chat/completions"


class JobSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """A body with what its headers said."""

    owner: str
    body: bytes
    priority: Priority = "standard"
    deadline_ms: int | None = None
    key: str = ""  # Idempotency-Key
    tags: tuple[str, ...] = ()


class SubmissionParser:
    """`tiers` by name and alias."""

    def __init__(self, config: JobsConfig, tiers: Mapping[str, Tier], allowed: tuple[Network, ...]) -> None:
        self._config = config
        self._tiers = tiers
        self._allowed = allowed

    def offer(self, ask: JobSubmission, now_ms: int, limits: TenantLimits) -> NewJob:
        """Raises InvalidRequest, ModelNotFound, UnsupportedFeature or WebhookRefused."""
        extras, body = _split(ask.body)
        request = self.checked(extras.endpoint, ask.body, ask.owner, ask.tags)  # as it came: a key given twice is seen
        limits.check_request(request)
        deadline_ms = ask.deadline_ms if extras.deadline_ms is None else extras.deadline_ms
        if deadline_ms is not None and deadline_ms <= 0:
            raise InvalidRequest("`deadline_ms` is the time left, more than 0", param="deadline_ms")
        if extras.webhook:
            if len(extras.webhook) > MAX_URL:
                raise InvalidRequest(f"`webhook` is longer than {MAX_URL} characters", param="webhook")
            check_webhook_url(extras.webhook, allow_http=self._config.webhooks.allow_http, allowed=self._allowed)
        return NewJob(
            id=f"job_{secrets.token_hex(12)}",
            owner=ask.owner,
            tier=self._tiers[request.model].name,
            priority=extras.priority or ask.priority,
            endpoint=extras.endpoint,
            body=body,
            deadline_ms=now_ms + self._time_ms(deadline_ms),
            webhook=extras.webhook,
            idempotency=key_digest(ask.key),
            digest=_digest(ask),
            tags=ask.tags,
        )

    def checked(self, endpoint: Endpoint, body: bytes, owner: str, tags: tuple[str, ...] = ()) -> Request:
        """What would only fail later fails now. Raises InvalidRequest, ModelNotFound or UnsupportedFeature."""
        request = parse_request(endpoint, body, owner, tags)
        if request.model not in self._tiers:
            known = ", ".join(self._tiers)
            raise ModelNotFound(f"The model {request.model[:64]!r} is no tier here. There are: {known}.", param="model")
        check_supported(request)
        return request

    def tier(self, request: Request) -> str:
        return self._tiers[request.model].name

    def _time_ms(self, deadline_ms: int | None) -> int:
        if deadline_ms is None:
            return int(self._config.default_deadline_s * 1000)
        return min(deadline_ms, int(self._config.max_deadline_s * 1000))


def key_digest(key: str) -> str:
    """Of an Idempotency-Key: the key itself may be anybody's secret. Raises InvalidRequest."""
    if not key:
        return ""
    if not _KEY.fullmatch(key):
        raise InvalidRequest("`Idempotency-Key` is 1 to 255 visible ASCII characters")
    return hashlib.sha256(key.encode()).hexdigest()


def _digest(ask: JobSubmission) -> str:
    """Of all that was asked."""
    headers = ",".join((ask.priority, *ask.tags)).encode()
    return hashlib.sha256(headers + b"\0" + ask.body).hexdigest()


def _split(body: bytes) -> tuple[_ExtensionFields, bytes]:
    """Ours, and the body without it. What is malformed in the rest is said by the parser of the endpoint."""
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("The body is not a JSON object.") from None
    found = {name: document.pop(name) for name in _EXTENSION_FIELDS if name in document}
    if not found:
        return _ExtensionFields(), body
    try:
        extras = msgspec.json.decode(msgspec.json.encode(found), type=_ExtensionFields)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise InvalidRequest(reason, param=place.rstrip("`") or None) from None
    return extras, msgspec.json.encode(document)
