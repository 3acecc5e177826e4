"""What goes wrong between this box and a broker; none of it reaches a client."""

from __future__ import annotations


class BrokerError(Exception):
    """The connection cannot be made, or was lost.

    Args:
        message: for operators.
        lasting: a person must act.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.lasting = lasting


class PublishRefused(Exception):
    """The broker refuses a message, and goes on."""


class AnswerTooLarge(Exception):
    """The broker takes no message of this size."""
