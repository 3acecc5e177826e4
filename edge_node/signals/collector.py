"""Build the snapshot for a decision: device readings, signals of the edge and the cloud, spending, and the time.

The device is sampled about once a second; the other signals are read at each decision, because a burst of requests
changes them. Signals that are expensive to compute (sums of spending) are computed only if the policy names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from router.policy.compiled import Policy
from router.types import CloudSignals, DeviceSignals, EdgeSignals, Location, NowSignals, Snapshot, SpendSignals

from ..clock import Clock

_MAX_RECENT_AGE_S = 0.05


class EdgeSource(Protocol):
    def signals(self) -> EdgeSignals: ...


class CloudSource(Protocol):
    def signals(self) -> CloudSignals: ...


class SpendSource(Protocol):
    def signals(self, second: int) -> SpendSignals: ...


class SignalCollector:
    """The signals of one daemon.

    Args:
        clock: Monotonic and wall-clock time.
        spend: The spending.
        edge: The engine's signals; None: this box has no engine, and its edge targets are absent.
        cloud: The cloud's signals; None: no cloud is configured, and its cloud targets are absent.
        read_device: Reads the device signals at a monotonic time.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        spend: SpendSource,
        edge: EdgeSource | None = None,
        cloud: CloudSource | None = None,
        read_device: Callable[[float], DeviceSignals] = lambda _: DeviceSignals(),
    ) -> None:
        self._clock = clock
        self._edge = edge
        self._cloud = cloud
        self._read_device = read_device
        self._device = DeviceSignals()
        self._spend = spend
        self._now_cache: tuple[int, NowSignals] = (0, NowSignals())
        self._recent: tuple[float, Snapshot] = (float("-inf"), Snapshot())  # (taken at: monotonic s, snapshot)
        self._policy: Policy | None = None
        self._needs_spend = False
        self._targets_at: dict[Location, frozenset[str]] = {}
        self._absent: frozenset[str] = frozenset()

    @property
    def device(self) -> DeviceSignals:
        """The last device readings."""
        return self._device

    def sample_device(self) -> None:
        """Read the device signals; takes about a millisecond."""
        self._device = self._read_device(self._clock.monotonic())

    def recent_snapshot(self, policy: Policy) -> Snapshot:
        """Return a snapshot that is up to 50 ms old: recent enough for a cache lookup, not for a decision."""
        now = self._clock.monotonic()
        if now - self._recent[0] > _MAX_RECENT_AGE_S or policy is not self._policy:
            self._recent = (now, self.snapshot(policy))
        return self._recent[1]

    def snapshot(self, policy: Policy) -> Snapshot:
        """Return the signals of this moment for a decision of `policy`."""
        if policy is not self._policy:
            self._prepare(policy)
        edge = EdgeSignals() if self._edge is None else self._edge.signals()
        cloud = CloudSignals() if self._cloud is None else self._cloud.signals()
        second = int(self._clock.unix())
        return Snapshot(
            device=self._device,
            edge=edge,
            cloud=cloud,
            spend=self._spend.signals(second) if self._needs_spend else SpendSignals(),
            now=self._now_signals(second),
            down=self._down(edge, cloud),
            absent=self._absent,
        )

    def _prepare(self, policy: Policy) -> None:
        self._policy = policy
        self._needs_spend = any(name.startswith("spend.") for name in policy.needs)
        for location in ("edge", "cloud"):
            self._targets_at[location] = frozenset(target.name for target in policy.targets if target.at == location)
        edge = self._targets_at["edge"] if self._edge is None else frozenset()
        self._absent = edge | (self._targets_at["cloud"] if self._cloud is None else frozenset())

    def _down(self, edge: EdgeSignals, cloud: CloudSignals) -> frozenset[str]:
        """Return the targets that cannot answer now. A cloud that was never probed counts as up."""
        down: frozenset[str] = frozenset()
        if self._edge is not None and not edge.loaded:
            down |= self._targets_at["edge"]
        if cloud.reachable is False or cloud.breaker == "open":
            down |= self._targets_at["cloud"]
        if cloud.unavailable_models and self._policy is not None:
            targets = self._policy.targets
            down |= {
                target.name for target in targets if target.at == "cloud" and target.model in cloud.unavailable_models
            }
        return down

    def _now_signals(self, second: int) -> NowSignals:
        if self._now_cache[0] != second:
            local = time.localtime(second)
            signals = NowSignals(local.tm_hour, local.tm_wday + 1, local.tm_min, second)
            self._now_cache = (second, signals)
        return self._now_cache[1]
