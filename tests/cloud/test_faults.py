from __future__ import annotations

import pytest

from cloud_pool.faults import StubDead, error_of, translate
from router.errors import (
    CausewayError,
    CloudFailed,
    CloudRejected,
    CloudUnreachable,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidGrammar,
    QueueFull,
)


@pytest.mark.parametrize(
    ("status", "text", "kind", "http"),
    [
        ("INVALID_ARGUMENT", "context_length_exceeded: 3000 tokens, at most 2048", ContextLengthExceeded, 400),
        ("INVALID_ARGUMENT", "invalid_schema: no", InvalidGrammar, 400),
        ("UNAVAILABLE", "queue_full: 256 wait", QueueFull, 429),
        ("INTERNAL", "deadline_exceeded: over", DeadlineExceeded, 504),
        ("INTERNAL", "Stub process 'm_0_0' is not healthy.", StubDead, 503),
        ("UNAVAILABLE", "Exceeds maximum queue size", QueueFull, 429),
        ("UNAVAILABLE", "failed to connect to all addresses", CloudUnreachable, 503),
        ("NOT_FOUND", "Request for unknown model: 'm' is not found", EngineUnavailable, 503),
        ("", "Request for unknown model: 'm' is not found", EngineUnavailable, 503),
        ("", "inference input 'text_input' data-type is 'FP32', but model 'm' expects 'BYTES'", CloudRejected, 502),
        ("INVALID_ARGUMENT", "unexpected inference input", CloudRejected, 502),
        ("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction", CloudRejected, 502),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded, 504),
        ("INTERNAL", "Failed to process the request(s): ZeroDivisionError\nAt: /secret/model.py(3)", CloudFailed, 502),
    ],
)
def test_each_error_of_triton_is_one_of_ours(status: str, text: str, kind: type[CausewayError], http: int) -> None:
    """Status and text of the real server (and of our model) choose the class; the class owns the HTTP status."""
    found = translate(status, text, "first_token")
    assert type(found) is kind
    assert found.status == http
    assert "/secret" not in found.message
    if http in (429, 503):
        assert found.retry_after_s is not None


def test_an_unknown_code_is_a_failed_backend() -> None:
    """A code that this version does not know is no reason to crash."""
    assert isinstance(error_of("brand_new", "x"), CloudFailed)
