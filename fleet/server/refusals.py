"""The reasons for which the control plane refuses a message, each with a code to which the device reacts."""

from __future__ import annotations

from causeway_server.router.errors import AuthenticationFailed, CausewayError, PermissionDenied

# --- enrolment -------------------------------------------------------------------------------------------------------


class JoinTokenUnknown(AuthenticationFailed, code="join_token_unknown"):
    """The join token is unknown."""


class JoinTokenUsed(PermissionDenied, code="join_token_used"):
    """The join token has no uses left. If your device did not use it, it was stolen: revoke the device that did."""


class JoinTokenExpired(PermissionDenied, code="join_token_expired"):
    """The join token has expired."""


class EnrolmentProofInvalid(AuthenticationFailed, code="enrolment_proof_invalid"):
    """The device does not hold the key that it wants to enrol."""


class DeviceNameTaken(PermissionDenied, status=409, code="device_name_taken"):
    """Another device has this name."""


class NoCohort(PermissionDenied, code="no_cohort"):
    """No cohort of the fleet matches the device's labels, or the join token's cohort no longer exists."""


# --- signed messages -------------------------------------------------------------------------------------------------


class DeviceUnknown(AuthenticationFailed, code="device_unknown"):
    """The device is not enrolled here."""


class DeviceRevoked(PermissionDenied, code="device_revoked"):
    """The device was revoked, and must enrol again with a new key."""


class SignatureInvalid(AuthenticationFailed, code="signature_invalid"):
    """The message is not signed by the key of the device that it names."""


class ForeignDevice(PermissionDenied, code="foreign_device"):
    """The message's token belongs to a device other than the one that the message names."""


class RequestStale(AuthenticationFailed, code="request_stale"):
    """The request's `sent` is over five minutes off: take the time from the header `Date` and send again."""


class TokenRequestReplayed(CausewayError, status=409, type="invalid_request_error", code="token_request_replayed"):
    """A token request with this or a later `sent` was answered before."""


class StatusReplayed(CausewayError, status=409, type="invalid_request_error", code="status_replayed"):
    """A report of this boot with this or a later `seq` arrived before."""


class TokenExpired(AuthenticationFailed, code="token_expired"):
    """The bearer token has expired: ask for a new one."""
