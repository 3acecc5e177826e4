"""Errors that only pipelines have."""

from __future__ import annotations

from router.errors import CausewayError


class DeliveredTooOften(CausewayError):
    """Every process that ran the message ended without an outcome."""

    code = "worker_lost"


class LeaseLost(Exception):
    """Another process receives for this pipeline now."""
