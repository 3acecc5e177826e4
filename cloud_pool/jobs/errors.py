"""The faults that only jobs have, leaves of router.errors."""

from __future__ import annotations

from router.errors import CausewayError, InvalidRequest


class JobStoreUnavailable(CausewayError):
    """Redis does not answer, or cannot write. Whether it took the last command is not known."""

    status = 503
    code = "job_store_unavailable"
    retryable = True


class JobStoreRefused(JobStoreUnavailable):
    """Redis answers, with an error: it cannot write, or may not be asked this."""


class JobStoreNotDurable(JobStoreUnavailable):
    """Redis is set up so that what it acknowledged may be lost: no job is taken."""

    code = "job_store_not_durable"
    retryable = False


class IdempotencyConflict(InvalidRequest):
    """The key was used with another body."""

    status = 409
    code = "idempotency_conflict"


class JobAlreadyEnded(InvalidRequest):
    """What ended cannot be cancelled."""

    status = 409
    code = "job_ended"


class WebhookRefused(InvalidRequest):
    """The address is one that no webhook may go to."""

    code = "webhook_refused"


class WebhookDisabled(InvalidRequest):
    """The address answered 410 Gone."""

    code = "webhook_disabled"


class ResultTooLarge(InvalidRequest):
    """The answer is beyond what is kept; it would be as large again."""

    status = 422
    code = "answer_too_large"
