"""Translation of Triton's errors: gRPC status and text to a class of router.errors.

    unreachable, killed                        UNAVAILABLE            503 cloud_unreachable
    our engine's own codes ("queue_full: …")   in the stream          that class
    Triton's queue is full or timed out        in the stream          429 queue_full
    the stub is dead                           in the stream          503 engine_unavailable   (StubProcessDied: reload)
    unloaded, or Triton drains                 in the stream, NOT_FOUND   503 engine_unavailable
    the call's deadline                        DEADLINE_EXCEEDED      504 deadline_exceeded
    tensors that the model does not accept     in the stream          502 cloud_rejected
    the model raised, and all other errors     in the stream          502 cloud_failed

An error inside the stream has no status and is recognised by its text. With the metadata `triton_grpc_error` Triton
sends most of them as statuses instead. We do not use it, because it crashes 24.10 (signal 11) after some dozens of
failed calls among successful ones, even if other clients sent those.
"""

from __future__ import annotations

import re

from causeway_server.router.errors import (
    BackendError,
    CausewayError,
    ClientGone,
    CloudFailed,
    CloudRejected,
    CloudUnreachable,
    DeadlineExceeded,
    EngineUnavailable,
    Phase,
    QueueFull,
    error_classes,
)

RETRY_S = 1.0
"""Retry-After: a dead stub is reloaded, and a killed Triton is back, within seconds."""

_REJECTED = re.compile(
    r"\[request id: |.*(?:inference input|inference request|inputs but got|raw_input_contents)", re.DOTALL
)
"""Beginnings of errors that Triton finds before a model has seen the request."""
_CLASSES = {
    code: kind
    for code, kind in error_classes().items()
    if kind.__module__ == CausewayError.__module__ and kind not in (BackendError, ClientGone)
}
"""Error classes by code of our engine."""
_CODE = re.compile(r"^([a-z][a-z_]+): (.*)$", re.DOTALL)


class StubProcessDied(EngineUnavailable):
    """The Python backend's process died: every call fails until the model is unloaded and loaded again."""


def stub_process_died(phase: Phase) -> StubProcessDied:
    return StubProcessDied(
        "The model's process in Triton died; it is being restarted.", phase=phase, retry_after_s=RETRY_S
    )


def error_of(code: str, detail: str) -> CausewayError:
    """Build the error of router.errors that owns `code`; an unknown code becomes CloudFailed."""
    error_class = _CLASSES.get(code)
    if error_class is None:
        return CloudFailed(f"{code}: {detail}")
    return error_class(detail, retry_after_s=RETRY_S if error_class.status in (429, 503) else None)


def translate(status: str, text: str, phase: Phase) -> CausewayError:
    """Translate an error. `status`: the gRPC code's name, "" for an error inside the stream."""
    coded = _CODE.match(text)
    if coded and coded[1] in _CLASSES:
        return error_of(coded[1], coded[2])
    lower = text.lower()
    if "is not healthy" in lower:
        return stub_process_died(phase)
    if status == "NOT_FOUND" or ("unknown model" in lower) or ("is not ready" in lower):
        return EngineUnavailable("The model is not loaded in Triton.", phase=phase, retry_after_s=RETRY_S)
    if "exceeds maximum queue size" in lower or "request timeout expired" in lower:
        return QueueFull("Triton's queue is full.", retry_after_s=RETRY_S)
    if status in ("UNAVAILABLE", "CANCELLED") or "stopped accepting new inference requests" in lower:  # it ends
        return CloudUnreachable("Triton cannot be reached.", phase=phase, retry_after_s=RETRY_S)
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExceeded("The request's deadline has passed.")
    if status in ("INVALID_ARGUMENT", "UNIMPLEMENTED") or (not status and _REJECTED.match(text)):
        return CloudRejected(f"Triton refused the request: {_first_line(text)}.", phase=phase)
    return CloudFailed("The model failed in Triton.", phase=phase)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
