"""Errors that only jobs of a device have: leaves of the tree in router.errors."""

from __future__ import annotations

from router.errors import CausewayError, InvalidRequest, QueueFull


class OutboxFull(QueueFull):
    """The device holds as many jobs, or as many bytes of them, as it may."""

    code = "outbox_full"


class JobNotDead(InvalidRequest):
    """Only a dead letter can be retried."""

    status = 409
    code = "job_not_dead"


class JobNotEnded(InvalidRequest):
    """A job that has not ended is cancelled, not purged."""

    status = 409
    code = "job_not_ended"


class JobDropped(CausewayError):
    """A bulk job that waited gave way to a newer job, because the outbox was full."""

    status = 503
    code = "job_dropped"


class JobLost(CausewayError):
    """The daemon ended during each of many runs of the job."""

    code = "daemon_lost"
