from __future__ import annotations

import pytest

from causeway_server.cloud_pool.upstreams.triton.errors import StubProcessDied, error_of, translate
from causeway_server.router.errors import (
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
        # Inside the stream.
        ("", "context_length_exceeded: 3000 tokens, at most 2048", ContextLengthExceeded, 400),
        ("", "invalid_schema: no", InvalidGrammar, 400),
        ("", "queue_full: 256 wait", QueueFull, 429),
        ("", "deadline_exceeded: over", DeadlineExceeded, 504),
        ("", "Stub process 'm_0_0' is not healthy.", StubProcessDied, 503),
        ("", "[request id: r-1] Exceeds maximum queue size", QueueFull, 429),
        ("", "Request timeout expired", QueueFull, 429),
        ("", "Request for unknown model: 'm' is not found", EngineUnavailable, 503),
        ("", "Request for unknown model: 'm' has no available versions", EngineUnavailable, 503),
        (
            "",
            "[request id: r] inference input 'text_input' data-type is 'FP32', but model 'm' expects 'BYTES'",
            CloudRejected,
            502,
        ),
        ("", "unexpected inference input 'z' for model 'm'", CloudRejected, 502),
        ("", "expected 1 inputs but got 2 inputs for model 'm'", CloudRejected, 502),
        (
            "",
            "Failed to process the request(s) for model 'm_0_0', message: KeyError: 'secret'\nAt: /secret",
            CloudFailed,
            502,
        ),
        ("", "plain words of a model", CloudFailed, 502),
        (
            "",
            "Server is stopping, scheduler for model has stopped accepting new inference requests.",
            CloudUnreachable,
            503,
        ),
        # As statuses.
        ("UNAVAILABLE", "failed to connect to all addresses", CloudUnreachable, 503),
        ("NOT_FOUND", "Request for unknown model: 'm' is not found", EngineUnavailable, 503),
        ("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction", CloudRejected, 502),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded, 504),
        ("INTERNAL", "RST_STREAM with error code 2", CloudFailed, 502),
    ],
)
def test_triton_errors_are_translated(status: str, text: str, kind: type[CausewayError], http: int) -> None:
    """The texts are those of Triton 24.10 and of our model; each class owns its HTTP status."""
    error = translate(status, text, "first_token")
    assert type(error) is kind
    assert error.status == http
    assert "/secret" not in error.message
    if http in (429, 503):
        assert error.retry_after_s is not None


def test_unknown_code_is_cloud_failed() -> None:
    assert isinstance(error_of("brand_new", "x"), CloudFailed)
