"""Errors that only jobs have: leaves of the tree in router.errors."""

from __future__ import annotations

from router.errors import BodyTooLarge, CausewayError, InvalidRequest, JobStoreUnavailable, RateLimited


class JobStoreRefused(JobStoreUnavailable):
    """Redis answers with an error: it cannot write, or forbids the command."""


class JobStoreNotDurable(JobStoreUnavailable):
    """Redis may lose what it acknowledged, by its settings: no job is accepted."""

    code = "job_store_not_durable"
    retryable = False


class JobStoreLayoutMismatch(JobStoreUnavailable):
    """The keys in Redis are those of another version of Causeway: nothing is read or changed."""

    code = "job_store_layout"
    retryable = False


class JobStoreNotReplicated(JobStoreUnavailable):
    """Too few replicas of Redis have confirmed what was accepted: a failover could lose it."""

    code = "job_store_not_replicated"


class JobStoreIsCluster(JobStoreUnavailable):
    """Redis is a node of a cluster, where jobs do not run."""

    code = "job_store_is_cluster"
    retryable = False


class ContentKeyMissing(JobStoreUnavailable):
    """Requests or results are encrypted with a key that this process does not have."""

    code = "content_key_missing"


class TokenRevoked(CausewayError):
    """The token that submitted the job, or its device, was revoked before the job ran."""

    status = 403
    type = "permission_error"
    code = "token_revoked"


class WebhookDisabled(InvalidRequest):
    """The URL answered 410 Gone."""

    code = "webhook_disabled"


class FileStoreUnavailable(JobStoreUnavailable):
    """The store of file contents does not answer, cannot write, or is full."""

    code = "file_store_unavailable"


class FileContentLost(CausewayError):
    """A file's record exists and its content does not: something other than Causeway deleted it."""

    code = "file_content_lost"


class FileTooLarge(BodyTooLarge):
    """The file is larger than one file, or all files of the tenant, may be."""

    code = "file_too_large"


class QuotaExceeded(RateLimited):
    """The tenant has as many files, bytes or batches as it may have."""

    code = "quota_exceeded"
