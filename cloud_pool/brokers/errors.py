"""Errors that only brokers have: leaves of the tree in router.errors."""

from __future__ import annotations

from router.errors import CausewayError


class BrokerUnavailable(CausewayError):
    """The broker does not answer, or refuses. Whether it carried out the last command is unknown."""

    status = 503
    code = "broker_unavailable"
    retryable = True


class MessageTooLarge(CausewayError):
    """The broker takes no message of this size."""

    status = 413
    code = "message_too_large"
