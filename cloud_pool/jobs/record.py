"""A job as it is kept, and as its owner sees it."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.errors import CausewayError

from ..admission import Priority
from .states import FINAL_STATES, JobState

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
WebhookStatus = Literal["", "pending", "delivered", "failed", "disabled"]


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants done, checked and ready to be accepted."""

    id: str
    owner: str
    tier: str
    priority: Priority
    endpoint: Endpoint
    body: bytes  # of the request, as OpenAI has it
    deadline_ms: int  # unix
    webhook: str = ""
    idempotency: str = ""  # digest of the caller's key; "": none
    digest: str = ""  # of all that was asked, to compare with under the same key
    batch: str = ""  # whose line it is
    tags: tuple[str, ...] = ()  # of the headers; the body may have its own
    traceparent: str = ""  # of the span that sends it
    ttl_ms: int = 0  # kept so long after its end; 0: as all are


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    tier: str
    priority: Priority
    endpoint: Endpoint
    body: bytes  # empty once it has ended, unless it may be retried
    state: JobState
    created: int  # unix ms, as all times here
    deadline: int
    started: int | None = None
    finished: int | None = None
    attempts: int = 0
    postponed: int = 0
    fence: int = 0
    error: bytes = b""  # JSON
    webhook: str = ""
    webhook_status: WebhookStatus = ""
    batch: str = ""
    tags: str = ""  # with commas
    traceparent: str = ""
    cache: str = ""  # what the shared cache did for the answer

    @property
    def ended(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def tagged(self) -> tuple[str, ...]:
        return tuple(self.tags.split(",")) if self.tags else ()


def parse_record(fields: dict[str, bytes]) -> JobRecord:
    """From Redis's hash. Raises msgspec.ValidationError for a record that is none."""
    body = fields.get("body", b"")
    plain = {name: value.decode() for name, value in fields.items() if name not in ("body", "error")}
    record = msgspec.convert(plain | {"body": b"", "error": b""}, JobRecord, strict=False)
    return msgspec.structs.replace(record, body=body, error=fields.get("error", b""))


def encode_error(error: CausewayError) -> bytes:
    """The inner object of OpenAI's error."""
    fault = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode(fault)


class JobView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """`GET /v1/jobs/{id}`; times are unix seconds."""

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
    attempts: int
    cache: str | None
    error: msgspec.Raw
    result: msgspec.Raw
    webhook: str | None
    webhook_status: str | None


def view(record: JobRecord, result: bytes = b"") -> JobView:
    return JobView(
        id=record.id,
        status=record.state.value,
        model=record.tier,
        priority=record.priority,
        endpoint=record.endpoint,
        created_at=record.created // 1000,
        started_at=None if record.started is None else record.started // 1000,
        finished_at=None if record.finished is None else record.finished // 1000,
        deadline_at=record.deadline // 1000,
        attempts=record.attempts,
        cache=record.cache or None,
        error=msgspec.Raw(record.error or b"null"),
        result=msgspec.Raw(result or b"null"),
        webhook=record.webhook or None,
        webhook_status=record.webhook_status or None,
    )
