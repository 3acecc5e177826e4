"""The energy that answers take from the battery and turn into heat, and its price, for a policy's `budget`.

1. Cost. What is drawn above the draw without work, over the tokens that were made meanwhile, is the cost of a token; a
   cloud's answer costs the policy's `radio_w` for as long as it takes.
2. Battery. It holds what was drawn over the fall of its charge: an old one holds less than it says, and is taken for
   one until that is measured. What the draw without work does not need until the policy's hour is left for answers.
3. Heat. What may be drawn without reaching the limit within a time constant of the device is left for answers.
4. Price. Both are budgets of watt-hours for the same offers, and the tighter one sets the price (`pacing`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from causeway_server.router.decision.pacing import MAX_PRICE, EnergyState, Pacer, Steps
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.file import hours
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.trackers import Ewma
from causeway_server.router.types import AttemptRecord, DeviceSignals, EnergySignals

from ..backends.backend import EngineWork
from ..storage.spend import ENERGY, SpendStore

if TYPE_CHECKING:
    from .heat import HeatModel

log = logging.getLogger(__name__)

_REPRICED_S, _SAVED_S = 5.0, 300.0
_GAP_S = 60.0  # without a sample: the device slept
_OLDEST, _STATED = 0.65, 0.04  # what a battery is taken to hold of what it says, until this share was discharged
_LAG: Final = 0.004  # of the smoothed charge, behind what was drawn
_UNFORESEEN: Final = 1.08  # of the draw without work, which may rise
_MEMORY: Final = 2.0  # discharges that the capacity remembers
_TOKENS, _FEWEST_TOKENS = 20_000.0, 50.0  # that the cost of a token remembers, and needs
_WARNED_S: Final = 300.0
_TEXT = "At the present draw this device reaches %.0f °C, short of being throttled, in %.0f s."


class EnergyBudget:
    """The energy of one device, under the policy that `use` activated last."""

    def __init__(self, spend: SpendStore) -> None:
        self._spend = spend
        self._heat: HeatModel | None = None  # once a policy paces heat
        self._pacer, self._state = Pacer(), EnergyState()
        self._tokens = 0  # as of the last sample
        self._idle, self._busy, self._draw = Ewma(900.0), Ewma(900.0), Ewma(30.0)  # W
        self._idle_w: float | None = None
        self._lose_charge()
        self._cloud_s, self._edge_s = Ewma(3600.0), Ewma(900.0)
        self._sampled = self._sampled_unix = self._priced = self._warned = float("-inf")
        self._saved = float("inf")  # until `load`: what earlier runs learned must not be overwritten
        self._policy: Policy | None = None
        self._since_h, self._until_h = 0.0, 24.0  # of the battery's day
        self.current = EnergySignals()
        """The signals as of the last `sample`."""

    async def load(self) -> None:
        """Load what earlier runs learned."""
        self._state = await self._spend.learned(ENERGY, EnergyState)
        self._pacer = Pacer(self._state.demand)
        self._saved = float("-inf")

    def save(self) -> None:
        """Write what was learned, if it was loaded before and the policy has such a budget."""
        if self._policy is not None and self._saved < float("inf"):
            self._spend.remember(ENERGY, msgspec.structs.replace(self._state, demand=self._pacer.state()))

    def use(self, policy: Policy) -> None:
        """Follow another policy."""
        self._policy, battery = policy if policy.paces_energy else None, policy.battery
        self._since_h, self._until_h = 0.0, 24.0
        if policy.heat is not None and self._heat is None:
            from .heat import HeatModel  # numpy is loaded on demand

            self._heat = HeatModel()
        if battery is not None:
            self._since_h = hours(battery.since)
            self._until_h = (hours(battery.until) - self._since_h) % 24.0
        self.current = EnergySignals()

    def offer(self, steps: Steps) -> None:
        """Take note of a choice between targets, for the price of the next ones."""
        day, passed = self._spend.local(self._since_h)
        self._pacer.offer(steps, day, int(passed))

    def answered(self, attempts: Iterable[AttemptRecord], now: float) -> None:
        """Take the times of finished attempts into account. `now`: monotonic seconds."""
        for one in attempts:
            (self._edge_s if one.at == "edge" else self._cloud_s).add((one.duration_ms or 0.0) / 1000.0, now)

    def sample(self, device: DeviceSignals, work: EngineWork, now: float) -> None:
        """Take the device's readings, and the work that its engines do, into account. `now`: monotonic seconds."""
        unix = self._spend.clock.unix()
        dt, passed_s, tokens = now - self._sampled, unix - self._sampled_unix, work.tokens - self._tokens
        self._sampled, self._sampled_unix, self._tokens = now, unix, work.tokens
        power_w = self._draw.value(now) if device.power_w is None else device.power_w
        if dt > _GAP_S or passed_s > dt + _GAP_S:  # the monotonic clock may stand still while the device sleeps
            self._lose_charge()
        if dt <= _GAP_S and power_w is not None:
            self._measure(device, power_w, work, tokens, dt, now)
        if self._policy is None or dt > _GAP_S:
            return
        if now - self._priced >= _REPRICED_S:
            self._priced = now
            if self._heat is not None:
                self._heat.fit()
            self.current = self._signals(self._policy, device, work.jobs, now)
        if now - self._saved >= _SAVED_S:
            self._saved = now
            self.save()

    def samples(self) -> Iterator[Sample]:
        """Yield the price of a watt-hour and the forecast of heat, for Prometheus."""
        known = self.current
        if known.price is not None:
            yield Sample("causeway_edge_energy_price", known.price, (("limit", known.limit),))
        if known.throttles_in_s is not None:
            yield Sample("causeway_edge_throttles_in_seconds", known.throttles_in_s)

    def _lose_charge(self) -> None:
        self._charge = Ewma(120.0)
        self._last_charge: float | None = None

    def _measure(
        self, device: DeviceSignals, power_w: float, work: EngineWork, made: int, dt: float, now: float
    ) -> None:
        if self._heat is not None:
            self._heat.observe(device.temperature_c, power_w, dt, now)
        if device.power_w is not None:
            self._draw.add(power_w, now)
            (self._busy if work.jobs else self._idle).add(power_w, now)
        self._idle_w = self._idle.value(now) or self._idle_w
        (_, drawn, fallen, excess, tokens), wh = msgspec.structs.astuple(self._state), power_w * dt / 3600.0
        if device.discharging is False:
            self._lose_charge()
        elif device.battery is not None:
            self._charge.add(device.battery, now)
            charge = self._charge.value(now) or 0.0
            if self._last_charge is not None:
                fallen = max(0.0, fallen + self._last_charge - charge)
            self._last_charge = charge
        if self._last_charge is not None:
            drawn += wh
        if self._idle_w is not None:
            tokens += made
            if work.jobs and work.answers:  # embeddings have no tokens
                excess += wh - self._idle_w * dt / 3600.0
        kept, paid = min(1.0, _MEMORY / max(fallen, 1e-9)), min(1.0, _TOKENS / max(tokens, 1.0))
        self._state = EnergyState(self._state.demand, drawn * kept, fallen * kept, excess * paid, tokens * paid)

    def _signals(self, policy: Policy, device: DeviceSignals, jobs: int, now: float) -> EnergySignals:
        prices, (day, passed), state = {"": 0.0}, self._spend.local(self._since_h), self._state
        wh_left = self._battery_wh(policy, device, self._until_h - passed, now)
        if wh_left is not None:
            prices["battery"] = self._pacer.price(max(0.0, wh_left), day, passed, self._until_h)
        throttles_in_s = None
        heat, settings = self._heat, policy.heat
        if heat and settings and (throttles_c := settings.limit_c or device.throttles_c):
            limit_c = throttles_c - settings.margin_c
            prices["heat"] = self._heat_price(heat, limit_c, jobs, (day, passed), now)
            throttles_in_s = heat.reaches_in_s(limit_c, self._draw.value(now) or 0.0, now)
            if throttles_in_s is not None and throttles_in_s < _WARNED_S:
                if now - self._warned > 2 * _WARNED_S:
                    log.warning(_TEXT, limit_c, throttles_in_s)
                self._warned = now
        binding = max(prices, key=prices.__getitem__)
        cloud_w = 0.0 if policy.battery is None else policy.battery.radio_w
        return EnergySignals(
            price=prices[binding],
            limit=binding,
            wh_left=wh_left,
            token_wh=max(0.0, state.excess_wh / state.tokens) if state.tokens >= _FEWEST_TOKENS else None,
            cloud_wh=cloud_w * (self._cloud_s.value(now) or 0.0) / 3600.0,
            throttles_in_s=throttles_in_s,
        )

    def _battery_wh(self, policy: Policy, device: DeviceSignals, hours_left: float, now: float) -> float | None:
        """Return what is left for answers; None if nothing is held back, or it is unknown."""
        battery, charge, state = policy.battery, self._charge.value(now), self._state
        if battery is None or hours_left <= 0.0 or device.discharging is False or charge is None:
            return None
        weight = 0.0 if device.battery_wh is None else _STATED
        if self._idle_w is None or state.fallen + weight < _STATED:
            return None
        holds_wh = (_OLDEST * weight * (device.battery_wh or 0.0) + state.drawn_wh) / (state.fallen + weight + _LAG)
        return (charge - battery.reserve - _LAG) * holds_wh - _UNFORESEEN * self._idle_w * hours_left

    def _heat_price(self, heat: HeatModel, limit_c: float, jobs: int, at: tuple[str, float], now: float) -> float:
        """Return the price of heat: the highest if another answer on the device would reach the limit."""
        busy_w = self._busy.value(now) or self._draw.value(now) or 0.0
        in_s = heat.reaches_in_s(limit_c, busy_w, now)
        if in_s is not None and in_s <= (self._edge_s.value(now) or 0.0) * (jobs + 1):
            return MAX_PRICE
        allowed = heat.allowed(limit_c, now)
        if allowed is None or self._idle_w is None:
            return 0.0
        power_w, window_h = allowed[0], allowed[1] / 3600.0
        return self._pacer.price(max(0.0, power_w - self._idle_w) * window_h, *at, at[1] + window_h)
