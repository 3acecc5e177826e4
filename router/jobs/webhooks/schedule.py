"""When a delivery that failed is repeated."""

from __future__ import annotations

from typing import Final

RETRY_DELAYS_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Delays between attempts, as the Standard Webhooks specification suggests; after the last one a delivery has failed.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""
_JITTER = 0.2


def webhook_retry_delay_s(attempts: int, chance: float) -> float | None:
    """Return the delay after `attempts` ≥ 1 failed attempts, ± 20 %, or None to give up. `chance` is in [0, 1)."""
    if attempts > len(RETRY_DELAYS_S):
        return None
    return RETRY_DELAYS_S[attempts - 1] * (1.0 + _JITTER * (2.0 * chance - 1.0))
