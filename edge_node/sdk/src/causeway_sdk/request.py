"""Encoding of a call's arguments to the request's path and body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Union
from urllib.parse import quote

Prefer = Literal["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]
Messages = Union[str, Sequence[Mapping[str, object]]]
"""A text (one user message), or OpenAI's list of messages."""

JSON = Mapping[str, object]


class RequestOptions(TypedDict, total=False):
    """Options of a request: our routing hints, OpenAI's fields by their own names, and `extra` for any other field.

    Attributes:
        model: ``auto`` (the default: the policy decides) or the name of one of the policy's targets.
        prefer: Narrows the policy: ``prefer_on_device``, ``only_on_device``, ``prefer_cloud`` or ``only_cloud``.
        tags: Tags for the policy's rules, such as ``private``.
        deadline_s: Seconds until the answer must be complete. The device and the cloud stop work at the deadline.
        extra: Further fields of the request body, by name.
    """

    model: str
    prefer: Prefer | None
    tags: Sequence[str]
    deadline_s: float | None
    temperature: float
    top_p: float
    max_tokens: int
    stop: str | Sequence[str]
    seed: int
    n: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool | int
    top_logprobs: int
    tools: Sequence[JSON]
    tool_choice: str | JSON
    response_format: JSON
    dimensions: int
    user: str
    extra: JSON


@dataclass(frozen=True, repr=False)
class Request:
    """A request to the device. `hints` go into the body's ``causeway`` object. `verb`: "" for GET without a body, else
    POST.
    """

    path: str
    body: JSON | None = None
    hints: JSON = field(default_factory=dict)
    deadline_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    verb: str = ""
    file: tuple[str, bytes] | None = None  # name and content of a file; `body` then has the other fields of the form

    @property
    def method(self) -> str:
        return self.verb or ("GET" if self.body is None else "POST")

    def encoded(self, left_s: float | None) -> dict[str, Any]:
        """Return headers and body as arguments of httpx. `left_s` is the rest of the deadline, in seconds."""
        headers = dict(self.headers)
        if self.file is not None:
            return {"headers": headers, "data": self.body, "files": {"file": self.file}}
        if self.body is None:
            return {"headers": headers}
        hints = dict(self.hints)
        if left_s is not None:
            hints["deadline_ms"] = max(1, int(left_s * 1000))
        body = json.dumps({**self.body, "causeway": hints} if hints else self.body).encode()
        return {"headers": {"content-type": "application/json", **headers}, "content": body}


def item_path(collection: str, item_id: str) -> str:
    """Return the path of one item. The id stays a single segment of the path, whatever characters it contains."""
    return f"{collection}/{quote(item_id, safe='').replace('.', '%2E')}"


def build_request(path: str, content: JSON, options: RequestOptions, *, stream: bool = False) -> Request:
    """Return a request with `content` (messages, prompt or input) and the options' fields."""
    if "resume" in options:
        raise TypeError("`resume` was removed: a truncated answer is not continued. Leave `resume` out.")
    fields: dict[str, object] = {"model": "auto", **content, **options}
    fields |= options.get("extra", {})
    for name in ("extra", "deadline_s"):
        fields.pop(name, None)
    hints = {name: value for name in ("prefer", "tags") if (value := fields.pop(name, None))}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(path, fields, hints, options.get("deadline_s"))


def build_chat_request(path: str, messages: Messages, options: RequestOptions, *, stream: bool = False) -> Request:
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(turn) for turn in messages]
    return build_request(path, {"messages": turns}, options, stream=stream)


def build_transcription_request(audio: bytes, language: str) -> Request:
    fields = {"model": "auto", "response_format": "text", **({"language": language} if language else {})}
    return Request("/v1/audio/transcriptions", fields, file=("audio", audio))


def build_upload_request(content: bytes, filename: str, expires_after_s: int | None) -> Request:
    fields = {"purpose": "user_data"}
    if expires_after_s is not None:
        fields["expires_after[anchor]"] = "created_at"
        fields["expires_after[seconds]"] = str(expires_after_s)
    return Request("/v1/files", fields, file=(filename, content))


def build_job_request(
    messages: Messages, options: RequestOptions, priority: str, not_before_s: float, webhook: str, key: str
) -> Request:
    """Return the request that submits a job. Its body is the same at each attempt, because the device compares it under
    the key.
    """
    request = build_chat_request("/v1/jobs", messages, options)
    fields: dict[str, object] = {**(request.body or {}), "priority": priority}
    if request.deadline_s is not None:
        fields["deadline_ms"] = max(1, int(request.deadline_s * 1000))
    if not_before_s > 0:
        fields["not_before_ms"] = int(not_before_s * 1000)
    if webhook:
        fields["webhook"] = webhook
    return Request("/v1/jobs", fields, request.hints, headers={"Idempotency-Key": key})
