"""The reasons for which the control plane refuses a message, each with a code that the box acts on."""

from __future__ import annotations

from router.errors import AuthenticationFailed, CausewayError, PermissionDenied

# --- enrolment -------------------------------------------------------------------------------------------------------


class JoinTokenUnknown(AuthenticationFailed):
    """No such join token was made here."""

    code = "join_token_unknown"


class JoinTokenUsed(PermissionDenied):
    """The join token has enrolled as many boxes as it may. If you did not use it, it was stolen: revoke that box."""

    code = "join_token_used"


class JoinTokenExpired(PermissionDenied):
    """The join token has expired."""

    code = "join_token_expired"


class EnrolmentProofInvalid(AuthenticationFailed):
    """The box does not hold the key that it wants to enrol."""

    code = "enrolment_proof_invalid"


class DeviceNameTaken(PermissionDenied):
    """Another device has this name."""

    status = 409
    code = "device_name_taken"


class NoCohort(PermissionDenied):
    """No cohort of the fleet matches the box's labels, or the join token names one that no longer exists."""

    code = "no_cohort"


# --- signed messages -------------------------------------------------------------------------------------------------


class DeviceUnknown(AuthenticationFailed):
    """The device is not enrolled here."""

    code = "device_unknown"


class DeviceRevoked(PermissionDenied):
    """The device was revoked: it has to enrol again, with a new key."""

    code = "device_revoked"


class SignatureInvalid(AuthenticationFailed):
    """The message is not signed by the key of the device that it names."""

    code = "signature_invalid"


class ForeignDevice(PermissionDenied):
    """The message is signed by another device than it names, by the token that came with it."""

    code = "foreign_device"


class RequestStale(AuthenticationFailed):
    """`sent` is more than five minutes off: take the time from the response's header `Date`, and ask again."""

    code = "request_stale"


class TokenRequestReplayed(CausewayError):
    """A token request with this or a later `sent` was answered before."""

    status = 409
    type = "invalid_request_error"
    code = "token_request_replayed"


class StatusReplayed(CausewayError):
    """A report of this boot with this or a later `seq` arrived before."""

    status = 409
    type = "invalid_request_error"
    code = "status_replayed"


class TokenExpired(AuthenticationFailed):
    """The bearer token has expired: ask for a new one."""

    code = "token_expired"
