"""Build the snapshot for a decision: device readings, signals of the edge and the cloud, spending, and the time.

The device is sampled about once a second; the other signals are read at each decision, because a burst of requests
changes them. Signals that are expensive to compute (sums of spending) are computed only if the policy names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from router.decision.spend import SpendState, SpendTracker
from router.policy.compiled import Policy
from router.types import CloudSignals, DeviceSignals, EdgeSignals, Location, NowSignals, Snapshot, SpendSignals

from ..clock import Clock

FILE = "spend.json"
_MAX_RECENT_AGE_S = 0.05


class EdgeSource(Protocol):
    def signals(self) -> EdgeSignals: ...


class CloudSource(Protocol):
    def signals(self) -> CloudSignals: ...


class SignalCollector:
    """The signals of one daemon.

    Args:
        clock: Monotonic and wall-clock time.
        edge: The engine's signals; None: this box has no engine, and its edge targets are down.
        cloud: The cloud's signals; None: no cloud is configured, and its cloud targets are down.
        read_device: Reads the device signals at a monotonic time.
        state_dir: Where spending is kept over restarts; None: nowhere.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        edge: EdgeSource | None = None,
        cloud: CloudSource | None = None,
        read_device: Callable[[float], DeviceSignals] = lambda _: DeviceSignals(),
        state_dir: Path | None = None,
    ) -> None:
        self._clock = clock
        self._edge = edge
        self._cloud = cloud
        self._read_device = read_device
        self._path = None if state_dir is None else state_dir / FILE
        self._device = DeviceSignals()
        self._spend = SpendTracker(restored=_load_spend(self._path))
        self._spend_changed = False
        self._lost_spend_writes = 0
        self._spend_cache: tuple[int, SpendSignals] = (0, SpendSignals())  # (computed in this Unix second, signals)
        self._now_cache: tuple[int, NowSignals] = (0, NowSignals())
        self._recent: tuple[float, Snapshot] = (float("-inf"), Snapshot())  # (taken at: monotonic s, snapshot)
        self._policy: Policy | None = None
        self._needs_spend = False
        self._targets_at: dict[Location, frozenset[str]] = {}

    @property
    def device(self) -> DeviceSignals:
        """The last device readings."""
        return self._device

    @property
    def lost_spend_writes(self) -> int:
        """Number of times that spending could not be written to disk."""
        return self._lost_spend_writes

    def sample_device(self) -> None:
        """Read the device signals; takes about a millisecond."""
        self._device = self._read_device(self._clock.monotonic())

    def add_cost(self, usd: float) -> None:
        """Add the cost of an answer, US dollars, to the spending."""
        if usd > 0.0:
            self._spend.add(usd, self._clock.unix())
            self._spend_changed = True
            self._spend_cache = (0, SpendSignals())

    def save_spend(self) -> None:
        """Write the spending to disk, by rename. Blocks. A failure is counted and retried at the next call."""
        if self._path is None or not self._spend_changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(self._path.name + ".partial")
            partial.write_bytes(msgspec.json.encode(self._spend.state()))
            partial.replace(self._path)
            self._spend_changed = False
        except OSError:
            self._lost_spend_writes += 1

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
            spend=self._spend_signals(second) if self._needs_spend else SpendSignals(),
            now=self._now_signals(second),
            down=self._down(edge, cloud),
        )

    def _prepare(self, policy: Policy) -> None:
        self._policy = policy
        self._needs_spend = any(name.startswith("spend.") for name in policy.needs)
        for location in ("edge", "cloud"):
            self._targets_at[location] = frozenset(target.name for target in policy.targets if target.at == location)

    def _down(self, edge: EdgeSignals, cloud: CloudSignals) -> frozenset[str]:
        """Return the targets that cannot answer now. A cloud that was never probed counts as up."""
        down: frozenset[str] = frozenset()
        if not edge.loaded:
            down |= self._targets_at["edge"]
        if self._cloud is None or cloud.reachable is False or cloud.breaker == "open":
            down |= self._targets_at["cloud"]
        if cloud.unavailable_models and self._policy is not None:
            targets = self._policy.targets
            down |= {
                target.name for target in targets if target.at == "cloud" and target.model in cloud.unavailable_models
            }
        return down

    def _spend_signals(self, second: int) -> SpendSignals:
        if self._spend_cache[0] != second:
            self._spend_cache = (second, self._spend.signals(float(second)))
        return self._spend_cache[1]

    def _now_signals(self, second: int) -> NowSignals:
        if self._now_cache[0] != second:
            local = time.localtime(second)
            signals = NowSignals(local.tm_hour, local.tm_wday + 1, local.tm_min, second)
            self._now_cache = (second, signals)
        return self._now_cache[1]


def _load_spend(path: Path | None) -> SpendState | None:
    """Load the spending. Returns None if the file is missing or unreadable: counting then starts at 0."""
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=SpendState)
    except (OSError, msgspec.DecodeError):
        return None
