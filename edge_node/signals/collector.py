"""The one owner of the Snapshot: the device's readings, both places' own signals, what was spent, and the time.

The device is sampled about once a second (`sample`), the rest is asked at each decision because a burst changes it.
What costs something (sums over money spent) is computed only when the policy names it.
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
_RECENT_S = 0.05


class EdgeSource(Protocol):
    def signals(self) -> EdgeSignals: ...


class CloudSource(Protocol):
    def signals(self) -> CloudSignals: ...


class SignalCollector:
    """`edge` or `cloud` None: this box has none, and its targets are down. `state_dir` None: spending is not kept."""

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
        self._spend = SpendTracker(restored=_restored(self._path))
        self._spend_changed = False
        self._spend_lost = 0
        self._spent: tuple[int, SpendSignals] = (0, SpendSignals())  # (of this second, signals)
        self._now: tuple[int, NowSignals] = (0, NowSignals())
        self._recent: tuple[float, Snapshot] = (float("-inf"), Snapshot())  # (taken at, monotonic s)
        self._policy: Policy | None = None
        self._wants_spend = False
        self._at: dict[Location, frozenset[str]] = {}

    @property
    def device(self) -> DeviceSignals:
        return self._device

    @property
    def lost_spend_writes(self) -> int:
        """How often the money spent could not be written down."""
        return self._spend_lost

    def sample_device(self) -> None:
        """Read the device; cheap, about a millisecond."""
        self._device = self._read_device(self._clock.monotonic())

    def add_cost(self, usd: float) -> None:
        if usd > 0.0:
            self._spend.add(usd, self._clock.unix())
            self._spend_changed = True
            self._spent = (0, SpendSignals())

    def save_spend(self) -> None:
        """Write down what was spent, by rename. Blocks; a disk that refuses is counted, and asked again next time."""
        if self._path is None or not self._spend_changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(self._path.name + ".partial")
            partial.write_bytes(msgspec.json.encode(self._spend.state()))
            partial.replace(self._path)
            self._spend_changed = False
        except OSError:
            self._spend_lost += 1

    def recent_snapshot(self, policy: Policy) -> Snapshot:
        """A snapshot that may be `_RECENT_S` old: good enough to look into the cache, not to decide by."""
        now = self._clock.monotonic()
        if now - self._recent[0] > _RECENT_S or policy is not self._policy:
            self._recent = (now, self.snapshot(policy))
        return self._recent[1]

    def snapshot(self, policy: Policy) -> Snapshot:
        if policy is not self._policy:
            self._learn(policy)
        edge = EdgeSignals() if self._edge is None else self._edge.signals()
        cloud = CloudSignals() if self._cloud is None else self._cloud.signals()
        second = int(self._clock.unix())
        return Snapshot(
            device=self._device,
            edge=edge,
            cloud=cloud,
            spend=self._spend_signals(second) if self._wants_spend else SpendSignals(),
            now=self._now_signals(second),
            down=self._down(edge, cloud),
        )

    def _learn(self, policy: Policy) -> None:
        self._policy = policy
        self._wants_spend = any(name.startswith("spend.") for name in policy.needs)
        for place in ("edge", "cloud"):
            self._at[place] = frozenset(target.name for target in policy.targets if target.at == place)

    def _down(self, edge: EdgeSignals, cloud: CloudSignals) -> frozenset[str]:
        """Targets that cannot answer now. A cloud that was never probed gets its chance."""
        down: frozenset[str] = frozenset()
        if not edge.loaded:
            down |= self._at["edge"]
        if self._cloud is None or cloud.reachable is False or cloud.breaker == "open":
            down |= self._at["cloud"]
        if cloud.away and self._policy is not None:
            down |= {one.name for one in self._policy.targets if one.at == "cloud" and one.model in cloud.away}
        return down

    def _spend_signals(self, second: int) -> SpendSignals:
        if self._spent[0] != second:
            self._spent = (second, self._spend.signals(float(second)))
        return self._spent[1]

    def _now_signals(self, second: int) -> NowSignals:
        if self._now[0] != second:
            local = time.localtime(second)
            signals = NowSignals(local.tm_hour, local.tm_wday + 1, local.tm_min, second)
            self._now = (second, signals)
        return self._now[1]


def _restored(path: Path | None) -> SpendState | None:
    """None when nothing was kept, or nobody can read it: then counting starts afresh."""
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=SpendState)
    except (OSError, msgspec.DecodeError):
        return None
