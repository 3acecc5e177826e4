"""One error tree. Each class owns its HTTP status and its OpenAI `type` and `code`; nothing else picks a status.

Foreign exceptions are translated into these once, at the adapter that meets them. `phase` says where an attempt broke,
`retryable` whether another attempt may be made before the first byte reached the client.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Phase = Literal["connect", "send", "first_token", "stream"]


class CausewayError(Exception):
    """Base. `message` is for people: what, where, what to do. `param` is the path of the offending key, if any."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


# --- the request is wrong: nothing was tried -------------------------------------------------------------------------


class InvalidRequest(CausewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidJSON(InvalidRequest):
    code = "invalid_json"


class MissingField(InvalidRequest):
    code = "missing_required_parameter"


class UnknownField(InvalidRequest):
    code = "unknown_parameter"


class UnsupportedFeature(InvalidRequest):
    """Valid OpenAI, but no target that may answer can do it."""

    code = "unsupported_feature"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """A JSON schema that cannot be turned into a grammar."""

    code = "invalid_schema"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class RequestTimeout(InvalidRequest):
    """The request itself did not arrive in time: a slow sender."""

    status = 408
    code = "request_timeout"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class AuthenticationFailed(CausewayError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(CausewayError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


# --- not now ---------------------------------------------------------------------------------------------------------


class RateLimited(CausewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QueueFull(CausewayError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retryable = True


class Shed(CausewayError):
    """There is more to do than can be done, and this could not be done in its time, or matters less than the rest."""

    status = 503
    code = "overloaded"
    retryable = True


class Draining(CausewayError):
    status = 503
    type = "server_error"
    code = "draining"


class IdentityUnavailable(CausewayError):
    """Who asks cannot be established now: what tells revoked tokens from others is out of reach."""

    status = 503
    code = "identity_unavailable"


class DeadlineExceeded(CausewayError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class NoRoute(CausewayError):
    """Constraints, wishes or abilities left no target: fail closed. The message names what cut each one."""

    status = 503
    type = "routing_error"
    code = "no_route"


class AllAttemptsFailed(CausewayError):
    """Every attempt's reason is in the message."""

    status = 503
    type = "routing_error"
    code = "all_attempts_failed"


class ClientGone(CausewayError):
    """The caller left; nobody reads this, the record does."""

    status = 499
    code = "client_gone"


# --- an attempt broke ------------------------------------------------------------------------------------------------


class BackendError(CausewayError):
    """A target failed. `phase` says how far it got."""

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


class EngineUnavailable(BackendError):
    """The engine is starting, backing off after a crash, or has no model."""

    status = 503
    code = "engine_unavailable"


class EngineCrashed(BackendError):
    code = "engine_crashed"


class EngineOutOfMemory(BackendError):
    """No KV space left, even after idle prefixes were evicted."""

    status = 503
    code = "engine_out_of_memory"


class EngineTimeout(BackendError):
    """No first token, or no whole answer, in the target's time."""

    status = 504
    code = "engine_timeout"


class CloudUnreachable(BackendError):
    """Refused, no route, DNS, TLS."""

    status = 503
    code = "cloud_unreachable"


class CloudTimeout(BackendError):
    """No first token, or no whole answer, in the target's time."""

    status = 504
    code = "cloud_timeout"


class CloudSaturated(BackendError):
    """The cloud said 429 or 503."""

    status = 503
    code = "cloud_saturated"


class CloudUnavailable(BackendError):
    """The cloud answers, and says that nothing behind it can: no replica lives, say. The way to it is well."""

    status = 503
    code = "cloud_unavailable"


class CloudRejected(BackendError):
    """The cloud said 4xx: our credentials, or a body that it refuses."""

    code = "cloud_rejected"


class CloudFailed(BackendError):
    """The cloud said 5xx, or broke the protocol."""

    code = "cloud_failed"


class StreamBroken(BackendError):
    """The answer stopped before its end."""

    code = "stream_broken"


class LowConfidence(BackendError):
    """Not a fault: the first tokens were not sure enough, the next attempt answers (a handoff)."""

    code = "low_confidence"


class BreakerOpen(BackendError):
    status = 503
    code = "breaker_open"


# --- files of the operator -------------------------------------------------------------------------------------------


class ConfigError(CausewayError):
    """A config or policy file is wrong. `where` is ``file:line: key.path`` as far as each is known."""

    code = "invalid_config"

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class PolicyError(ConfigError):
    code = "invalid_policy"
