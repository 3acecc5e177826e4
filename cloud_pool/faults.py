"""Triton's errors become ours here, once: gRPC status and text in, a class of router.errors out.

    unreachable, killed                        UNAVAILABLE            503 cloud_unreachable
    our engine's own codes ("queue_full: …")   any                    that class
    Triton's queue is full or timed out        UNAVAILABLE            429 queue_full
    the stub is dead                           INTERNAL               503 engine_unavailable   (StubDead: repair it)
    unloaded, or Triton drains                 NOT_FOUND              503 engine_unavailable
    the call's deadline                        DEADLINE_EXCEEDED      504 deadline_exceeded
    tensors that the model does not take       INVALID_ARGUMENT       502 cloud_rejected
    the model raised, and all else             INTERNAL …             502 cloud_failed

Errors that Triton finds before it runs the model come inside the stream without a status, and are known by their text.
"""

from __future__ import annotations

import re

from router.errors import (
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
)

RETRY_S = 1.0
"""A dead stub is repaired, and a killed Triton is back, within seconds."""

_CODE = re.compile(r"^([a-z][a-z_]+): (.*)$", re.DOTALL)


class StubDead(EngineUnavailable):
    """The Python backend's process is gone: every call fails until the model is unloaded and loaded again."""


def stub_dead(phase: Phase) -> StubDead:
    return StubDead("the model's process in Triton died; it is being restarted", phase=phase, retry_after_s=RETRY_S)


def error_of(code: str, detail: str) -> CausewayError:
    """The class of router.errors that owns `code`; an unknown code is a failed backend."""
    known = _classes().get(code)
    if known is None:
        return CloudFailed(f"{code}: {detail}")
    return known(detail, retry_after_s=RETRY_S if known.status in (429, 503) else None)


def translate(status: str, text: str, phase: Phase) -> CausewayError:
    """`status` is the gRPC code's name, "" for an error inside the stream."""
    said = _CODE.match(text)
    if said and said[1] in _classes():
        return error_of(said[1], said[2])
    lower = text.lower()
    if "is not healthy" in lower:
        return stub_dead(phase)
    if status == "NOT_FOUND" or ("unknown model" in lower) or ("is not ready" in lower):
        return EngineUnavailable("the model is not loaded in Triton", phase=phase, retry_after_s=RETRY_S)
    if status == "UNAVAILABLE" and ("exceeds maximum queue size" in lower or "request timeout expired" in lower):
        return QueueFull("Triton's queue is full", retry_after_s=RETRY_S)
    if status in ("UNAVAILABLE", "CANCELLED"):
        return CloudUnreachable("Triton cannot be reached", phase=phase, retry_after_s=RETRY_S)
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExceeded("the time for this request is over")
    if status in ("INVALID_ARGUMENT", "UNIMPLEMENTED", ""):
        return CloudRejected(f"Triton refused the request: {_first_line(text)}", phase=phase)
    return CloudFailed("the model failed in Triton", phase=phase)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _classes() -> dict[str, type[CausewayError]]:
    if not _CLASSES:
        _collect(CausewayError)
    return _CLASSES


_CLASSES: dict[str, type[CausewayError]] = {}


def _collect(parent: type[CausewayError]) -> None:
    for child in parent.__subclasses__():
        if child.__module__ == CausewayError.__module__ and child not in (BackendError, ClientGone):
            _CLASSES.setdefault(child.code, child)
        _collect(child)
