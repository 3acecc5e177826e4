"""The reasons for which a box refuses an update. Each has a code of its own, which the box reports."""

from __future__ import annotations

from ..errors import CausewayError


class UpdateRefused(CausewayError):
    """An update from the fleet is refused; the box keeps what it runs."""

    code = "update_refused"


# --- one bundle ------------------------------------------------------------------------------------------------------


class BundleInvalid(UpdateRefused):
    """The manifest or the rollout plan is malformed, or sets a key that a fleet may not set."""

    code = "bundle_invalid"


class BundleAltered(UpdateRefused):
    """The content differs from the hash or the length that was signed."""

    code = "bundle_altered"


class DaemonTooOld(UpdateRefused):
    """The bundle needs a newer daemon."""

    code = "daemon_too_old"


class BundleNotSigned(UpdateRefused):
    """The rollout names a bundle that the role `artifacts` did not sign."""

    code = "bundle_not_signed"


# --- the signed metadata ---------------------------------------------------------------------------------------------


class MetadataInvalid(UpdateRefused):
    """The signed metadata is malformed or incomplete."""

    code = "metadata_invalid"


class TooFewSignatures(UpdateRefused):
    """A role's metadata has fewer valid signatures than its threshold."""

    code = "too_few_signatures"


class MetadataRollback(UpdateRefused):
    """The metadata is older than what this box has verified before (a rollback)."""

    code = "metadata_rollback"


class MetadataFrozen(UpdateRefused):
    """The timestamp or the snapshot has expired: the source has brought nothing new since (a freeze), or the clock is
    wrong."""

    code = "metadata_frozen"


class RoleExpired(UpdateRefused):
    """The metadata of root, artifacts or rollout has expired."""

    code = "role_expired"


class MetadataMixed(UpdateRefused):
    """A metadata file is not the one that the snapshot or the timestamp names (mix and match)."""

    code = "metadata_mixed"


# --- the download ----------------------------------------------------------------------------------------------------


class EndlessData(UpdateRefused):
    """The source sends more bytes than were signed, or than this file may have."""

    code = "endless_data"


class DownloadTooSlow(UpdateRefused):
    """The download takes longer than its deadline, or runs below the least rate."""

    code = "download_too_slow"


class UpdateUnavailable(UpdateRefused):
    """The source does not answer, or does not have a file."""

    code = "update_unavailable"


# --- this box --------------------------------------------------------------------------------------------------------


class DiskFull(UpdateRefused):
    """The update does not fit on the box's disk, or the disk cannot be written."""

    code = "disk_full"


class PolicyUnusable(UpdateRefused):
    """The policy is invalid for this daemon."""

    code = "policy_unusable"


class CasesFailed(UpdateRefused):
    """A case of the bundle has another result on this box."""

    code = "cases_failed"


class RequestsLeave(UpdateRefused):
    """Requests that this box decided lately would leave it under the policy; the cohort's `leaving` is `refuse`."""

    code = "requests_leave"


class ModelUnusable(UpdateRefused):
    """A model of the bundle cannot be read, or the engine cannot load it."""

    code = "model_unusable"


class ModelTooLarge(UpdateRefused):
    """A model needs more memory than this box has for models."""

    code = "model_too_large"


# --- the trial -------------------------------------------------------------------------------------------------------


class GoldenAnswerDiffers(UpdateRefused):
    """The model answers a golden prompt with another text."""

    code = "golden_answer_differs"


class ErrorsRose(UpdateRefused):
    """More requests fail than before the change."""

    code = "errors_rose"


class DegradedRose(UpdateRefused):
    """More answers come from a fallback than before the change."""

    code = "degraded_rose"


class LatencyRose(UpdateRefused):
    """More requests are slow than before the change."""

    code = "latency_rose"


class HeatRose(UpdateRefused):
    """The device is hotter than before the change, or throttled."""

    code = "heat_rose"


class Unhealthy(UpdateRefused):
    """No target can answer, or an engine keeps crashing."""

    code = "unhealthy"


class BootsFailed(UpdateRefused):
    """The daemon ended several times during the trial."""

    code = "boots_failed"


class Withdrawn(UpdateRefused):
    """The plan no longer assigns the bundle that was on trial."""

    code = "withdrawn"
