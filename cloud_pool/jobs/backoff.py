"""When to try again. Pure: chance is an argument, in [0, 1)."""

from __future__ import annotations

from typing import Final

WEBHOOK_RETRY_DELAYS_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Between one delivery and the next, as the Standard Webhooks specification suggests; then it is given up.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""
_HOOK_JITTER = 0.2


def job_retry_delay_s(tried: int, chance: float, *, base_s: float, cap_s: float) -> float:
    """Full jitter over an exponential: uniform in (0, min(cap, base · 2^(tried-1))]. `tried` ≥ 1 attempts so far."""
    ceiling = min(cap_s, base_s * 2.0 ** min(tried - 1, 32))
    return ceiling * (1.0 - chance)


def webhook_retry_delay_s(tried: int, chance: float) -> float | None:
    """After `tried` ≥ 1 deliveries failed: the pause, ± 20 %, or None to give up."""
    if tried > len(WEBHOOK_RETRY_DELAYS_S):
        return None
    return WEBHOOK_RETRY_DELAYS_S[tried - 1] * (1.0 + _HOOK_JITTER * (2.0 * chance - 1.0))
