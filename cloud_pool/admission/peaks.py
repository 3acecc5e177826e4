"""How many places each tenant needs at once: the most that it had of late. Pure.

A tenant within its share of the places keeps as many for its next requests, so that another's flood leaves no queue in
its way. What it had more than once a while ago is forgotten by halves.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_S = 10.0
_REMEMBERED = 256  # tenants: the last to come
_LEAST = 0.5  # places: who needs less is forgotten


@dataclass(slots=True)
class Peak:
    """A tenant's."""

    places: float
    at: float  # monotonic, s
    weight: float

    def now(self, now: float) -> float:
        return float(self.places * 0.5 ** ((now - self.at) / HALF_S))


class Peaks:
    """`now` is monotonic, s."""

    def __init__(self) -> None:
        self._peaks: dict[str, Peak] = {}

    def seen(self, tenant: str, places: int, weight: float, now: float) -> None:
        """So many of a tenant's requests are here at once."""
        peak = self._peaks.pop(tenant, None)
        most = max(float(places), peak.now(now) if peak else 0.0)
        self._peaks[tenant] = Peak(most, now, weight)  # the last one now
        if len(self._peaks) > _REMEMBERED:
            del self._peaks[next(iter(self._peaks))]

    def kept(self, held: dict[str, int], limit: int, now: float) -> float:
        """Places to be kept for those who are within their share of `limit`, over what they hold."""
        for tenant in [tenant for tenant, peak in self._peaks.items() if peak.now(now) < _LEAST]:
            del self._peaks[tenant]
        if len(self._peaks) < 2:
            return 0.0
        weights = sum(peak.weight for peak in self._peaks.values())
        return sum(
            max(0.0, min(peak.now(now), limit * peak.weight / weights) - held.get(tenant, 0))
            for tenant, peak in self._peaks.items()
        )
