"""The error tree. Each class owns its HTTP status and its OpenAI `type` and `code`; nothing else chooses a status.

Foreign exceptions are translated to these once, by the adapter that catches them. `phase` tells how far an attempt got,
and `retryable` whether another attempt may follow as long as the client has received no byte of the answer.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Phase = Literal["connect", "send", "first_token", "stream"]


class CausewayError(Exception):
    """An internal fault of the server. All other error classes are derived from this class.

    Args:
        message: The text for people: what is wrong, where, what to do.
        param: The path of the offending key in the request, if any.
        retry_after_s: The value of `Retry-After`, in seconds, if known.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init_subclass__(
        cls,
        *,
        status: int | None = None,
        type: str | None = None,  # noqa: A002 - OpenAI's name
        code: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        """Set the class variables that the class statement gives; the others are inherited."""
        super().__init_subclass__()
        values = {"status": status, "type": type, "code": code, "retryable": retryable}
        for name, value in values.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def error_classes() -> dict[str, type[CausewayError]]:
    """Return the class of each code, the most general one of several; classes of other modules are included."""
    found: dict[str, type[CausewayError]] = {}
    kinds: list[type[CausewayError]] = [CausewayError]
    for kind in kinds:
        found.setdefault(kind.code, kind)
        kinds += kind.__subclasses__()
    return found


# --- the request is invalid: no target was tried ---------------------------------------------------------------------


class InvalidRequest(CausewayError, status=400, type="invalid_request_error", code="invalid_value"):
    """A value in the request is invalid."""


class InvalidJSON(InvalidRequest, code="invalid_json"):
    """The body is not valid JSON."""


class MissingField(InvalidRequest, code="missing_required_parameter"):
    """A required field is missing."""


class UnknownField(InvalidRequest, code="unknown_parameter"):
    """The request has an unknown field at a place where unknown fields are refused."""


class UnsupportedFeature(InvalidRequest, code="unsupported_feature"):
    """The request is valid, but none of the targets that may answer it supports it."""


class ThreadsUnsupported(UnsupportedFeature, code="thread_unsupported_request"):
    """This server keeps no conversations. After this error code, Anthropic's clients send the whole conversation."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt does not fit into the model's context."""


class InvalidGrammar(InvalidRequest, code="invalid_schema"):
    """A JSON schema in the request has a keyword that the server cannot enforce."""


class GuardRefused(InvalidRequest, code="guard_refused"):
    """A rule of the guard refuses the request, because its texts have personal data or secret keys."""


class BodyTooLarge(InvalidRequest, status=413, code="body_too_large"):
    """The body of the request is larger than the server accepts."""


class RequestTimeout(InvalidRequest, status=408, code="request_timeout"):
    """The server did not receive the complete request in time."""


class UnsupportedMediaType(InvalidRequest, status=415, code="unsupported_media_type"):
    """The Content-Type or Content-Encoding is not supported."""


class NotFound(InvalidRequest, status=404, code="not_found"):
    """The requested path or object does not exist."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The model that the request names does not exist. The message lists the existing models."""


class ModelNotAllowed(ModelNotFound, status=403):
    """The model exists, but the client may not use it. The message lists the models that the client may use."""


class MethodNotAllowed(InvalidRequest, status=405, code="method_not_allowed"):
    """The path exists, but does not support this HTTP method."""

    def __init__(self, message: str, *, allow: str = "") -> None:
        """Create the error. `allow`: the methods of the path, as the header `Allow` lists them."""
        super().__init__(message)
        self.allow = allow


class MisdirectedRequest(InvalidRequest, status=421, code="misdirected_request"):
    """The request's header `Host` is not a name of this server. A web page may have pointed a host name of its own to
    this server's address.
    """


class AuthenticationFailed(CausewayError, status=401, type="authentication_error", code="invalid_api_key"):
    """The API key or token is missing or invalid."""


class PermissionDenied(CausewayError, status=403, type="permission_error", code="permission_denied"):
    """The client is authenticated, but lacks the permission for this request."""


class OriginNotAllowed(PermissionDenied, code="origin_not_allowed"):
    """The request comes from a web page of another origin. Such a page may not send this request."""


# --- the request is valid, but cannot be served now ------------------------------------------------------------------


class RateLimited(CausewayError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """The client sends more requests, or uses more tokens, than its limits allow."""


class QueueFull(CausewayError, status=429, type="rate_limit_error", code="queue_full", retryable=True):
    """The queue of waiting requests is full, or every target is saturated."""


class Shed(CausewayError, status=429, type="rate_limit_error", code="overloaded", retryable=True):
    """The server is overloaded: it cannot serve this request in time, or serves requests of higher priority first."""


class Draining(CausewayError, status=503, type="server_error", code="draining"):
    """The server is shutting down and accepts no new requests."""


class IdentityUnavailable(CausewayError, status=503, code="identity_unavailable"):
    """The server cannot verify the client's identity now, because the list of revoked tokens is unreachable."""


class DeadlineExceeded(CausewayError, status=504, type="timeout_error", code="deadline_exceeded"):
    """The request's deadline passed before the answer was complete."""


class NoRoute(CausewayError, status=503, type="routing_error", code="no_route"):
    """Constraints, preferences or abilities exclude every target. The message names the reason for each target."""


class SessionTargetUnavailable(NoRoute, code="session_target_unavailable"):
    """The session is pinned to one target (`session.mode: require`), and this target cannot answer. The message names
    it.
    """


class OutsideRegion(NoRoute, code="outside_region"):
    """The request is bound to regions, but needs a place outside these regions. The message names the regions and the
    place.
    """


class AllAttemptsFailed(CausewayError, status=503, type="routing_error", code="all_attempts_failed"):
    """Every attempt to answer the request failed. The message lists the reasons."""


class TargetsFailed(AllAttemptsFailed, status=502):
    """Every attempt reached its target, but failed then: the target broke off, or its answer could not be used."""


class ClientGone(CausewayError, status=499, code="client_gone"):
    """The client disconnected. This error is recorded, but not sent."""


# --- jobs ------------------------------------------------------------------------------------------------------------


class JobStoreUnavailable(CausewayError, status=503, code="job_store_unavailable", retryable=True):
    """The store of jobs does not answer, or cannot write. The last command may or may not have been executed."""


class RecordUnreadable(CausewayError, code="record_unreadable"):
    """A stored record, such as a job, is damaged or was written by another version."""


class ResultTooLarge(InvalidRequest, status=422, code="answer_too_large"):
    """The job's answer is larger than `max_result_bytes` allows. Another attempt would not change that."""


class IdempotencyConflict(InvalidRequest, status=409, code="idempotency_conflict"):
    """The `Idempotency-Key` was used before, with another body."""


class JobCancelled(CausewayError, status=409, code="job_cancelled"):
    """The job was cancelled before it was answered."""


class JobAlreadyEnded(InvalidRequest, status=409, code="job_ended"):
    """The job or batch cannot be cancelled, because it has ended."""


# --- an attempt failed -----------------------------------------------------------------------------------------------


class BackendError(CausewayError, status=502, type="backend_error", code="backend_error", retryable=True):
    """A target failed. The field `phase` says how far the attempt got."""

    def __init__(
        self,
        message: str,
        *,
        phase: Phase = "first_token",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.phase: Phase = phase


class TargetNotConfigured(BackendError, status=503, code="target_not_configured"):
    """This device cannot reach the target, because no engine or no cloud is configured."""


class GuardFailed(BackendError, status=503, code="guard_failed"):
    """The guard could not mask the request for this target: detectors failed, were too slow, or cannot read a part."""


class EngineUnavailable(BackendError, status=503, code="engine_unavailable"):
    """The device's engine is starting, waits before it restarts after a crash, or has no model."""


class EngineCrashed(BackendError, code="engine_crashed"):
    """The process of the device's engine died while it worked on the request."""


class EngineOutOfMemory(BackendError, status=503, code="engine_out_of_memory"):
    """The engine's KV cache is full, even after the engine evicted the prefixes that no request uses."""


class EngineTimeout(BackendError, status=504, code="engine_timeout"):
    """The first token, or the whole answer, did not arrive within the target's time."""


class EncoderFailed(BackendError, status=503, code="encoder_failed"):
    """The request has only audio, images or files, and the encoders of this device found nothing in them in time."""


class CloudUnreachable(BackendError, status=503, code="cloud_unreachable"):
    """The connection to the cloud failed, for example because of the network route, DNS or TLS, or because it was
    refused.
    """


class CloudTimeout(BackendError, status=504, code="cloud_timeout"):
    """The first token, or the whole answer, did not arrive within the target's time."""


class CloudDisconnected(CloudUnreachable, status=502, code="cloud_disconnected"):
    """The cloud closed the connection without an answer. The cloud may have received the request."""


class CloudSaturated(BackendError, status=429, type="rate_limit_error", code="cloud_saturated"):
    """The cloud answered 429 or 503."""


class CloudUnavailable(BackendError, status=503, code="cloud_unavailable"):
    """The cloud is reachable, but reports that no server behind it can answer."""


class CloudRejected(BackendError, code="cloud_rejected"):
    """The cloud refuses the credentials or the URL that this server uses. Requests fail until these are corrected."""


class CloudRefused(BackendError, type="invalid_request_error", code="cloud_refused"):
    """The cloud refuses the request and gives a reason. Another target may accept it."""


class CloudPaymentRequired(CloudRefused, status=402, code="cloud_payment_required"):
    """The cloud answered 402: the account has no credit."""


class CloudNotFound(CloudRefused, status=404, code="cloud_not_found"):
    """The cloud answered 404: the cloud does not know the model or the path."""


class CloudBodyTooLarge(CloudRefused, status=413, code="cloud_body_too_large"):
    """The cloud answered 413: the body is larger than the cloud accepts."""


class CloudUnprocessable(CloudRefused, status=422, code="cloud_unprocessable"):
    """The cloud answered 422: the cloud does not accept a value in the request."""


class CloudLegallyUnavailable(CloudRefused, status=451, code="cloud_unavailable_for_legal_reasons"):
    """The cloud answered 451: the cloud may not answer, for legal reasons."""


class CloudFailed(BackendError, code="cloud_failed"):
    """The cloud answered 5xx or violated the protocol."""


class CloudUnreadable(CloudFailed, code="cloud_unreadable"):
    """The cloud answered 200 with a body that is not an answer. This fault does not count for the circuit breaker."""


class StreamBroken(BackendError, code="stream_broken"):
    """The answer stopped before its end."""


class LowConfidence(BackendError, code="low_confidence"):
    """The confidence of the answer's first tokens was too low, so the next target answers. This is a handoff, not a
    fault.
    """


class BreakerOpen(BackendError, status=503, code="breaker_open"):
    """No request was sent to the target, because its circuit breaker is open."""


# --- the operator's files --------------------------------------------------------------------------------------------


class ConfigError(CausewayError, code="invalid_config"):
    """A configuration file is invalid. The message begins with ``file:line: key.path``, as far as these are known."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class PolicyError(ConfigError, code="invalid_policy"):
    """A policy file is invalid."""
