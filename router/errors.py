"""The error tree. Each class owns its HTTP status and its OpenAI `type` and `code`; nothing else chooses a status.

Foreign exceptions are translated to these once, at the adapter that catches them. `phase` says how far an attempt got,
`retryable` whether another attempt may follow while the client has no byte of the answer.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Phase = Literal["connect", "send", "first_token", "stream"]


class CausewayError(Exception):
    """An internal fault; the base of all errors that a client can see.

    Args:
        message: for people: what is wrong, where, what to do.
        param: the path of the offending key in the request, if any.
        retry_after_s: the value of `Retry-After`, in seconds, if known.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def error_classes() -> dict[str, type[CausewayError]]:
    """Return the class of each code; of classes that share one, the most general. Those of other modules count, too."""
    found: dict[str, type[CausewayError]] = {}
    kinds: list[type[CausewayError]] = [CausewayError]
    for kind in kinds:
        found.setdefault(kind.code, kind)
        kinds += kind.__subclasses__()
    return found


# --- the request is invalid: no target was tried ---------------------------------------------------------------------


class InvalidRequest(CausewayError):
    """A value in the request is invalid."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidJSON(InvalidRequest):
    """The body is not valid JSON."""

    code = "invalid_json"


class MissingField(InvalidRequest):
    """A required field is missing."""

    code = "missing_required_parameter"


class UnknownField(InvalidRequest):
    """A field is unknown where unknown fields are refused."""

    code = "unknown_parameter"


class UnsupportedFeature(InvalidRequest):
    """The request is valid, but no target that may answer supports it."""

    code = "unsupported_feature"


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit into the model's context."""

    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """A JSON schema has a keyword that cannot be held."""

    code = "invalid_schema"


class BodyTooLarge(InvalidRequest):
    """The body is larger than the server accepts."""

    status = 413
    code = "body_too_large"


class RequestTimeout(InvalidRequest):
    """The request did not arrive completely in time."""

    status = 408
    code = "request_timeout"


class UnsupportedMediaType(InvalidRequest):
    """The Content-Type or Content-Encoding is not supported."""

    status = 415
    code = "unsupported_media_type"


class NotFound(InvalidRequest):
    """The path or the object does not exist."""

    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    """The model does not exist. The message lists the models that do."""

    code = "model_not_found"


class ModelNotAllowed(ModelNotFound):
    """The model exists, but the client may not use it. The message lists the models that it may use."""

    status = 403


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this HTTP method."""

    status = 405
    code = "method_not_allowed"

    def __init__(
        self, message: str, *, allow: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """`allow`: the methods that the path has, as the header `Allow` lists them."""
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.allow = allow


class MisdirectedRequest(InvalidRequest):
    """The request's `Host` is not a name of this server: a web page may have pointed its name here."""

    status = 421
    code = "misdirected_request"


class AuthenticationFailed(CausewayError):
    """The API key or token is missing or invalid."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(CausewayError):
    """The client is known, but may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class OriginNotAllowed(PermissionDenied):
    """A web page of another origin may not send this request."""

    code = "origin_not_allowed"


# --- the request is valid, but cannot be served now ------------------------------------------------------------------


class RateLimited(CausewayError):
    """The client sends more requests, or uses more tokens, than it may."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QueueFull(CausewayError):
    """The queue is full, or every target is saturated."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retryable = True


class Shed(CausewayError):
    """Overload: the request could not be served in time, or has less priority than the others."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retryable = True


class Draining(CausewayError):
    """The server is shutting down and accepts no new requests."""

    status = 503
    type = "server_error"
    code = "draining"


class IdentityUnavailable(CausewayError):
    """The client's identity cannot be verified now: the list of revoked tokens is unreachable."""

    status = 503
    code = "identity_unavailable"


class DeadlineExceeded(CausewayError):
    """The request's deadline passed before the answer was complete."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class NoRoute(CausewayError):
    """Constraints, preferences or abilities exclude every target. The message says what excludes each one."""

    status = 503
    type = "routing_error"
    code = "no_route"


class AllAttemptsFailed(CausewayError):
    """Every attempt failed. The message has the reason of each."""

    status = 503
    type = "routing_error"
    code = "all_attempts_failed"


class TargetsFailed(AllAttemptsFailed):
    """Every attempt failed, and each target was reached: it broke off, or its answer could not be used."""

    status = 502


class ClientGone(CausewayError):
    """The client disconnected. The error is recorded, not sent."""

    status = 499
    code = "client_gone"


# --- jobs ------------------------------------------------------------------------------------------------------------


class JobStoreUnavailable(CausewayError):
    """The store of jobs does not answer, or cannot write. Whether it executed the last command is unknown."""

    status = 503
    code = "job_store_unavailable"
    retryable = True


class RecordUnreadable(CausewayError):
    """A stored record, such as a job, is damaged or of another version."""

    code = "record_unreadable"


class ResultTooLarge(InvalidRequest):
    """The answer is larger than a job's may be (`max_result_bytes`); another attempt would not change that."""

    status = 422
    code = "answer_too_large"


class IdempotencyConflict(InvalidRequest):
    """The key was used with another body."""

    status = 409
    code = "idempotency_conflict"


class JobCancelled(CausewayError):
    """The job was cancelled before it was answered."""

    status = 409
    code = "job_cancelled"


class JobAlreadyEnded(InvalidRequest):
    """A job or batch that has ended cannot be cancelled."""

    status = 409
    code = "job_ended"


# --- an attempt failed -----------------------------------------------------------------------------------------------


class BackendError(CausewayError):
    """A target failed. `phase` says how far the attempt got."""

    status = 502
    type = "backend_error"
    code = "backend_error"
    retryable = True

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


class TargetNotConfigured(BackendError):
    """This box can never reach the target: it has no engine, or no cloud is configured."""

    status = 503
    code = "target_not_configured"


class EngineUnavailable(BackendError):
    """The engine is starting, waits before a restart after a crash, or has no model."""

    status = 503
    code = "engine_unavailable"


class EngineCrashed(BackendError):
    """The engine process died while it worked on the request."""

    code = "engine_crashed"


class EngineOutOfMemory(BackendError):
    """The KV cache is full, even after idle prefixes were evicted."""

    status = 503
    code = "engine_out_of_memory"


class EngineTimeout(BackendError):
    """The first token, or the whole answer, did not arrive within the target's time."""

    status = 504
    code = "engine_timeout"


class EncoderFailed(BackendError):
    """The encoders of this box found nothing in time, and without it the request says nothing."""

    status = 503
    code = "encoder_failed"


class CloudUnreachable(BackendError):
    """The connection failed: refused, no network route, DNS, TLS."""

    status = 503
    code = "cloud_unreachable"


class CloudTimeout(BackendError):
    """The first token, or the whole answer, did not arrive within the target's time."""

    status = 504
    code = "cloud_timeout"


class CloudDisconnected(CloudUnreachable):
    """The cloud closed the connection without an answer: whether it received the request is unknown."""

    status = 502
    code = "cloud_disconnected"


class CloudSaturated(BackendError):
    """The cloud answered 429 or 503."""

    status = 429
    type = "rate_limit_error"
    code = "cloud_saturated"


class CloudUnavailable(BackendError):
    """The cloud is reachable, but reports that no server behind it can answer."""

    status = 503
    code = "cloud_unavailable"


class CloudRejected(BackendError):
    """The cloud refuses this server's credentials, or its URL: the same request fails again until they are mended."""

    code = "cloud_rejected"


class CloudRefused(BackendError):
    """The cloud refuses the request for a reason that it gives. Another target may accept it."""

    type = "invalid_request_error"
    code = "cloud_refused"


class CloudPaymentRequired(CloudRefused):
    """The cloud answered 402: the account has no credit."""

    status = 402
    code = "cloud_payment_required"


class CloudNotFound(CloudRefused):
    """The cloud answered 404: it does not know the model or the path."""

    status = 404
    code = "cloud_not_found"


class CloudBodyTooLarge(CloudRefused):
    """The cloud answered 413: the body is larger than it accepts."""

    status = 413
    code = "cloud_body_too_large"


class CloudUnprocessable(CloudRefused):
    """The cloud answered 422: a value is not one that it accepts."""

    status = 422
    code = "cloud_unprocessable"


class CloudLegallyUnavailable(CloudRefused):
    """The cloud answered 451: it may not answer for legal reasons."""

    status = 451
    code = "cloud_unavailable_for_legal_reasons"


class CloudFailed(BackendError):
    """The cloud answered 5xx or violated the protocol."""

    code = "cloud_failed"


class CloudUnreadable(CloudFailed):
    """The cloud answered 200 with something that is not an answer. It does not count against the breaker."""

    code = "cloud_unreadable"


class StreamBroken(BackendError):
    """The answer stopped before its end."""

    code = "stream_broken"


class LowConfidence(BackendError):
    """Not a fault: the confidence of the first tokens was too low, so the next target answers (a handoff)."""

    code = "low_confidence"


class BreakerOpen(BackendError):
    """The circuit breaker of the target is open: no request was sent."""

    status = 503
    code = "breaker_open"


# --- the operator's files --------------------------------------------------------------------------------------------


class ConfigError(CausewayError):
    """A configuration file is invalid. `where` is ``file:line: key.path``, as far as each is known."""

    code = "invalid_config"

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class PolicyError(ConfigError):
    """A policy file is invalid."""

    code = "invalid_policy"
