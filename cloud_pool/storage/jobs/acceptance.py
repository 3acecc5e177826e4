"""What `accept` gets beside the job, and why it refuses one."""

from __future__ import annotations

from router.errors import CausewayError, IdempotencyConflict, JobAlreadyEnded, QueueFull, RateLimited

from ...accounts.tenants.config import TenantLimits
from ..config import JobsConfig
from ..record import NewJob

_RETRY_AFTER_S = 5.0
_MAX_COST = 1e6  # as in fair_queue.lua


def job_cost(job: NewJob, limits: TenantLimits) -> float:
    """Return what the job costs in the fair queue of its tier: tokens over its tenant's weight."""
    return min(max(1.0, job.tokens) / limits.weight, _MAX_COST)


def unfinished_jobs(config: JobsConfig, limits: TenantLimits) -> int:
    """Return how many unfinished jobs the tenant may have."""
    return limits.max_jobs or config.max_unfinished


def same_key_conflict(other: str) -> IdempotencyConflict:
    """Return the error for another request under the key of the job `other`."""
    return IdempotencyConflict(
        f"The Idempotency-Key was used with another body, for {other}. Send that body again, or a new key."
    )


def refusal(verdict: str, job: NewJob, other: str, config: JobsConfig, limits: TenantLimits) -> CausewayError | None:
    """Return why the job is not accepted, None if it is. `other` is the job that has its idempotency key."""
    if verdict == "conflict":
        return same_key_conflict(other)
    if verdict == "batch_over":
        return JobAlreadyEnded(f"The batch {job.batch} accepts no more lines.")
    if verdict == "queue_full":
        message = (
            f"The queue of {job.tier}, {job.priority}, is full: {config.max_queued} jobs (jobs.max_queued), and more"
            f" than {config.min_queued_per_tenant} of yours among them (jobs.min_queued_per_tenant)."
        )
        return QueueFull(message, retry_after_s=_RETRY_AFTER_S)
    if verdict == "tenant_full":
        bound = "tenants max_jobs" if limits.max_jobs else "jobs.max_unfinished"
        message = f"Your tenant has {unfinished_jobs(config, limits)} unfinished jobs, the maximum ({bound})."
        return RateLimited(message, retry_after_s=_RETRY_AFTER_S)
    if verdict == "tenant_bytes":
        message = (
            f"The requests of your tenant's unfinished jobs would exceed {config.max_unfinished_bytes} bytes, the"
            " maximum (jobs.max_unfinished_bytes)."
        )
        return RateLimited(message, retry_after_s=_RETRY_AFTER_S)
    return None
