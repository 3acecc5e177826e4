"""The interval behind a verdict of pass: how much worse the canary can be than the control, at any look.

Boxes are the unit, not requests: the variance is that of a ratio of sums over boxes (Cochran, Sampling Techniques,
1977, section 6.3; Deng, Knoblich and Lu, "Applying the Delta Method in Metric Analytics", KDD 2018). The interval is a
confidence sequence, valid at all looks together: the normal mixture of Robbins (Annals of Mathematical Statistics 41,
1970) in the form of Johari, Koomen, Pekelis and Walsh ("Always Valid Inference", Operations Research 70, 2022), which
holds asymptotically for means of any distribution (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform
central limit theory and asymptotic confidence sequences", Annals of Statistics 52, 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Difference:
    """Shares of canary and control, and the canary's minus the control's with its interval."""

    canary: float
    control: float
    low: float
    high: float

    @property
    def worse_by(self) -> float:
        return self.canary - self.control


def half_width(variance: float, effect: float, confidence: float) -> float:
    """Return half the width of the normal-mixture confidence sequence.

    Args:
        variance: Of the estimated difference, at this look.
        effect: Standard deviation of the mixture: the interval is narrowest where differences of about this size are
            just found.
        confidence: Such as 0.95, of all looks together.

    Returns:
        √(V (V + τ²) / τ² · ln((V + τ²) / (V α²))) for the variance V, the effect τ and the error probability α.
    """
    mixed = variance + effect**2
    return math.sqrt(variance * mixed / effect**2 * math.log(mixed / (variance * (1 - confidence) ** 2)))


def difference_of_shares(
    canary: tuple[NDArray[np.int64], NDArray[np.int64]],
    control: tuple[NDArray[np.int64], NDArray[np.int64]],
    effect: float,
    confidence: float,
) -> Difference:
    """Compare the share of events among requests between boxes of the canary and of the control.

    Args:
        canary: (events, requests), each int64 [boxes] with at least one box and one request.
        control: The same of the control's boxes.
        effect: See `half_width`.
        confidence: See `half_width`.
    """
    variance = _variance(canary, control)
    share, other = (float(events.sum() / requests.sum()) for events, requests in (canary, control))
    half = half_width(variance, effect, confidence)
    return Difference(share, other, share - other - half, share - other + half)


def _variance(*arms: tuple[NDArray[np.int64], NDArray[np.int64]]) -> float:
    """The larger of two: between boxes, and of independent requests. The latter counts one event and one other more
    than there were (Agresti and Caffo, The American Statistician 54, 2000), so that no events are not no variance."""
    boxes = sum(events.size for events, _ in arms)
    # One variance for both arms, as the null hypothesis has it: a canary of a few boxes could not estimate its own.
    squares = sum(float(((events - events.sum() / requests.sum() * requests) ** 2).sum()) for events, requests in arms)
    of_a_box = squares / max(1, boxes - len(arms))
    between = sum(events.size * of_a_box / float(requests.sum()) ** 2 for events, requests in arms)
    smoothed = [((events.sum() + 1) / (requests.sum() + 2), requests.sum()) for events, requests in arms]
    return max(between, sum(float(share * (1 - share) / requests) for share, requests in smoothed))
