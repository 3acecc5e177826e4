"""The collector, which builds the snapshot for a decision: device readings, signals of the edge and the cloud,
spending, and the time.

The device is sampled about once a second; the other signals are read at each decision, because a burst of requests
changes them. Costs count at once; old costs leave the sums of an hour, a day and a month within a second. All signals
are read, even those that the policy does not name, because decision records store them for replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import TargetAvailability
from causeway_server.router.trackers import Ewma
from causeway_server.router.types import (
    CloudSignals,
    DeviceSetup,
    DeviceSignals,
    EdgeSignals,
    Location,
    Modality,
    NowSignals,
    PromiseSignals,
    Snapshot,
)

from ..backends.backend import EngineWork
from ..backends.cloud.backend import Clouds
from ..clock import Clock
from .energy import EnergyBudget

if TYPE_CHECKING:
    from ..backends.engine.engines import EnginePool
    from ..storage.spend import SpendStore
    from .estimators import LearnedEstimators

_MAX_RECENT_AGE_S = 0.05
_FEEDBACK_HALF_LIFE_S = 3600.0
_NONE: frozenset[str] = frozenset()
_NO_CLOUD = CloudSignals()
_NO_PROMISES: dict[str, PromiseSignals] = {}


@dataclass(eq=False, repr=False)
class SignalCollector:
    """The signals of one daemon.

    Args:
        edge: The engine's signals; None: this device has no engine, and its edge targets are absent.
        clouds: The clouds' signals; cloud targets whose cloud is not among them are absent.
        read_device: Function that reads the device signals at a monotonic time.
        encoders: Kinds of parts that this device turns into text.
        projected: Function that returns the kinds of parts that a model takes as soft tokens; called per new policy.
        learned: The estimators, which know the edge models' calibrated signals that are set aside.
    """

    clock: Clock
    _: KW_ONLY
    spend: SpendStore
    edge: EnginePool | None = None
    clouds: Clouds = field(default_factory=Clouds)
    read_device: Callable[[float], DeviceSignals] = lambda _: DeviceSignals()
    encoders: tuple[Modality, ...] = ()
    projected: Callable[[str], tuple[Modality, ...]] = lambda _: ()
    learned: LearnedEstimators | None = None

    def __post_init__(self) -> None:
        self.device = DeviceSignals()  # the last readings
        self.energy = EnergyBudget(self.spend)
        self.feedback: dict[Location, Ewma] = {}  # clients' scores
        self._now_cache: tuple[int, NowSignals] = (0, NowSignals())
        self._recent: tuple[float, Snapshot] = (float("-inf"), Snapshot())  # (taken at: monotonic s, snapshot)
        self._last = Snapshot()
        self._policy: Policy | None = None
        self._setup = DeviceSetup(
            engine=self.edge is not None,
            cloud=bool(self.clouds),
            encoders=self.encoders,
            clouds=self.clouds.names,
            regions={cloud.name: cloud.region for cloud in self.clouds if cloud.region},
        )
        self._availability = TargetAvailability((), self._setup)

    def sample(self) -> None:
        """Read the device signals and the spending so far; takes about a millisecond."""
        now = self.clock.monotonic()
        self.device = self.read_device(now)
        self.spend.refresh()
        self.energy.sample(self.device, EngineWork() if self.edge is None else self.edge.work, now)

    def recent_snapshot(self, policy: Policy) -> Snapshot:
        """Return a snapshot that is up to 50 ms old: recent enough for a cache lookup, not for a decision."""
        policy = policy.base or policy
        now = self.clock.monotonic()
        if now - self._recent[0] > _MAX_RECENT_AGE_S or policy is not self._policy:
            self._recent = (now, self.snapshot(policy))
        return self._recent[1]

    def snapshot(self, policy: Policy) -> Snapshot:
        """Return the signals of this moment for a decision of `policy`."""
        policy = policy.base or policy  # targets of variants have the same names and places
        if policy is not self._policy:
            self.use(policy)
        edge = EdgeSignals() if self.edge is None else self.edge.signals()
        clouds = self.clouds.signals() if self._setup.cloud else {}
        cloud = next(iter(clouds.values()), _NO_CLOUD)
        if self.feedback:
            now = self.clock.monotonic()
            scores = {at: mean.value(now) for at, mean in self.feedback.items()}
            edge = msgspec.structs.replace(edge, feedback=scores.get("edge"))
            cloud = msgspec.structs.replace(cloud, feedback=scores.get("cloud"))
        uncalibrated = _NONE if self.learned is None else _uncalibrated(policy, self.learned)
        signals = (self.device, edge, cloud, self.spend.current, self._now_signals(int(self.clock.unix())))
        known = self._last
        promises = _NO_PROMISES if self.learned is None else self.learned.promises.signals
        rest = (clouds, uncalibrated, promises)
        same = (known.device, known.edge, known.cloud, known.spend, known.now) == signals
        same = same and known.setup is self._setup and known.energy is self.energy.current
        if same and (known.clouds, known.uncalibrated, known.promises) == rest:
            return known  # records of one moment share it
        self._last = Snapshot(
            *signals,
            down=self._availability.down(edge, cloud, clouds),
            absent=self._availability.absent,
            setup=self._setup,
            uncalibrated=uncalibrated,
            clouds=clouds,
            promises=promises,
            energy=self.energy.current,
        )
        return self._last

    def scored(self, at: Location, score: float) -> None:
        """Take a client's score, 0 to 1, of an answer from the device or the cloud into account."""
        self.feedback.setdefault(at, Ewma(_FEEDBACK_HALF_LIFE_S)).add(score, self.clock.monotonic())

    def use(self, policy: Policy) -> None:
        """Read the signals that depend on the policy's models: their projectors."""
        self._policy = policy
        self.energy.use(policy)
        self._setup = msgspec.structs.replace(
            self._setup,
            temperatures=policy.model_temperatures,
            projectors={model: kinds for model in policy.edge_models if (kinds := self.projected(model))},
        )
        self._availability = TargetAvailability(policy.offered, self._setup)

    def _now_signals(self, second: int) -> NowSignals:
        if self._now_cache[0] != second:
            local = time.localtime(second)
            signals = NowSignals(local.tm_hour, local.tm_wday + 1, local.tm_min, second)
            self._now_cache = (second, signals)
        return self._now_cache[1]


def _uncalibrated(policy: Policy, learned: LearnedEstimators) -> frozenset[str]:
    aside = learned.set_aside_pairs
    if not aside:
        return _NONE
    return frozenset(target.name for target in policy.targets if target.at == "edge" and target.served in aside)
