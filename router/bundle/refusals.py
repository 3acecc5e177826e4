"""The reasons for which a device refuses an update. Each has its own code, which the device reports."""

from __future__ import annotations

from ..errors import CausewayError


class UpdateRefused(CausewayError, code="update_refused"):
    """An update from the fleet is refused, and the device keeps its present bundle."""


# --- one bundle ------------------------------------------------------------------------------------------------------


class BundleInvalid(UpdateRefused, code="bundle_invalid"):
    """The manifest or the rollout plan is malformed, or sets a key that a fleet may not set."""


class BundleAltered(UpdateRefused, code="bundle_altered"):
    """The content differs from the hash or the length that was signed."""


class DaemonTooOld(UpdateRefused, code="daemon_too_old"):
    """The bundle needs a newer daemon."""


class BundleNotSigned(UpdateRefused, code="bundle_not_signed"):
    """The rollout names a bundle that the role `artifacts` did not sign."""


# --- the signed metadata ---------------------------------------------------------------------------------------------


class MetadataInvalid(UpdateRefused, code="metadata_invalid"):
    """The signed metadata is malformed or incomplete."""


class TooFewSignatures(UpdateRefused, code="too_few_signatures"):
    """A role's metadata has fewer valid signatures than its threshold."""


class MetadataRollback(UpdateRefused, code="metadata_rollback"):
    """The metadata is older than what this device has verified before (a rollback)."""


class MetadataFrozen(UpdateRefused, code="metadata_frozen"):
    """The timestamp or snapshot has expired: the source published nothing since (a freeze), or the clock is wrong."""


class RoleExpired(UpdateRefused, code="role_expired"):
    """The metadata of root, artifacts or rollout has expired."""


class MetadataMixed(UpdateRefused, code="metadata_mixed"):
    """A metadata file is not the one that the snapshot or the timestamp names (mix and match)."""


# --- the download ----------------------------------------------------------------------------------------------------


class EndlessData(UpdateRefused, code="endless_data"):
    """The source sends more bytes than the metadata declares, or more than the limit for this file."""


class DownloadTooSlow(UpdateRefused, code="download_too_slow"):
    """The download takes longer than its deadline, or runs below the minimum rate."""


class UpdateUnavailable(UpdateRefused, code="update_unavailable"):
    """The source does not answer, or lacks a file."""


# --- this device -----------------------------------------------------------------------------------------------------


class DiskFull(UpdateRefused, code="disk_full"):
    """The update does not fit on the device's disk, or the disk cannot be written."""


class PolicyUnusable(UpdateRefused, code="policy_unusable"):
    """The policy is invalid for this daemon."""


class CasesFailed(UpdateRefused, code="cases_failed"):
    """A test case of the bundle fails on this device."""


class RequestsLeave(UpdateRefused, code="requests_leave"):
    """Under the new policy some recent requests would leave the device, and the cohort's `leaving` is `refuse`."""


class ModelUnusable(UpdateRefused, code="model_unusable"):
    """A model of the bundle cannot be read, or the engine cannot load it."""


class ModelTooLarge(UpdateRefused, code="model_too_large"):
    """A model needs more memory than this device has for models."""


# --- the trial -------------------------------------------------------------------------------------------------------


class GoldenAnswerDiffers(UpdateRefused, code="golden_answer_differs"):
    """The model's answer to a golden prompt differs from the expected text."""


class ErrorsRose(UpdateRefused, code="errors_rose"):
    """More requests fail than before the change."""


class DegradedRose(UpdateRefused, code="degraded_rose"):
    """More answers come from a fallback than before the change."""


class LatencyRose(UpdateRefused, code="latency_rose"):
    """More requests are slow than before the change."""


class HeatRose(UpdateRefused, code="heat_rose"):
    """The device is hotter than before the change, or is throttled."""


class Unhealthy(UpdateRefused, code="unhealthy"):
    """No target can answer, or an engine keeps crashing."""


class BootsFailed(UpdateRefused, code="boots_failed"):
    """The daemon ended several times during the trial."""


class Withdrawn(UpdateRefused, code="withdrawn"):
    """The plan no longer assigns the bundle that was on trial."""
