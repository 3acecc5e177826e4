"""The reasons for which the control plane refuses a message, each with a code to which the device reacts."""

from __future__ import annotations

from causeway_server.router.errors import AuthenticationFailed, CausewayError, PermissionDenied

# --- enrolment -------------------------------------------------------------------------------------------------------


class JoinTokenUnknown(AuthenticationFailed, code="join_token_unknown"):
    """The join token is unknown."""


class JoinTokenUsed(PermissionDenied, code="join_token_used"):
    """The join token has no uses left. If your device did not use it, revoke the device that used the stolen token."""


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
    """The request's time `sent` is over five minutes off. Take the time from the header `Date`, and send again."""


class TokenRequestReplayed(CausewayError, status=409, type="invalid_request_error", code="token_request_replayed"):
    """The control plane has already answered a token request with the same time `sent`, or a later one."""


class StatusReplayed(CausewayError, status=409, type="invalid_request_error", code="status_replayed"):
    """The control plane already has a report of this boot with the same number `seq`, or a later one."""


class TokenExpired(AuthenticationFailed, code="token_expired"):
    """The bearer token has expired: ask for a new one."""
