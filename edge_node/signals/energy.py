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
import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from causeway_server.router.decision.pacing import MAX_PRICE, EnergyState, Pacer, Steps
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.file import hours
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.trackers import Ewma
from causeway_server.router.types import AttemptRecord, DeviceSignals, EnergySignals

from ..storage.spend import ENERGY, SpendStore

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
_TIME_CONSTANTS_S: Final = 15.0 * 2.0 ** np.arange(8)
_FIT_S, _FITTED_S = 1800.0, 540.0  # half-life of the readings that the heat is fitted to; how many it needs
_SHORTEST_S: Final = 120.0  # time in which the limit must not be reached


class HeatModel:
    """The device's temperature after its draw: of first order, with the time constant whose least squares fit best."""

    def __init__(self) -> None:
        self._smooth_w = np.full_like(_TIME_CONSTANTS_S, np.nan)  # the draw, smoothed with each time constant
        self._sums = np.zeros((6, len(_TIME_CONSTANTS_S)))
        self._now = Ewma(10.0)
        self._best, self._resistance = 0, 0.0  # index of the time constant; °C/W, 0: not fitted

    def observe(self, temperature_c: float | None, power_w: float, dt: float, now: float) -> None:
        """Take readings into account. `dt`: seconds since the last ones; `now`: monotonic seconds."""
        before_w = np.nan_to_num(self._smooth_w, nan=power_w)
        x = self._smooth_w = power_w + (before_w - power_w) * np.exp(-dt / _TIME_CONSTANTS_S)
        if temperature_c is not None:
            self._now.add(temperature_c, now)
            y = np.full_like(x, temperature_c)
            new = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])
            self._sums = self._sums * 0.5 ** (dt / _FIT_S) + new * dt

    def fit(self) -> None:
        """Choose the time constant whose error is least; without one the last choice stays."""
        if self._sums[0, 0] < _FITTED_S:
            return
        x, y, xx, xy, yy = self._sums[1:] / self._sums[0]
        variance = xx - x * x
        resistance = (xy - x * y) / np.maximum(variance, 1e-9)
        errors = yy - y * y - resistance**2 * variance
        errors[(variance < 0.05) | (resistance < 0.1) | (resistance > 50.0)] = np.inf
        best = int(errors.argmin())
        if math.isfinite(errors[best]):
            self._best, self._resistance = best, float(resistance[best])

    def allowed(self, limit_c: float, now: float) -> tuple[float, float] | None:
        """Return the draw, W, that reaches a temperature after so many seconds, and these; None if it is unknown."""
        temperature, time_constant_s = self._now.value(now), float(_TIME_CONSTANTS_S[self._best])
        if not self._resistance or temperature is None:
            return None
        window_s = max(_SHORTEST_S, time_constant_s)
        rise = (limit_c - temperature) / -math.expm1(-window_s / time_constant_s)
        return float(self._smooth_w[self._best]) + rise / self._resistance, window_s

    def reaches_in_s(self, limit_c: float, power_w: float, now: float) -> float | None:
        """Return the seconds after which a draw reaches a temperature; None if it does not, or it is unknown."""
        temperature = self._now.value(now)
        if temperature is None:
            return None
        left, rise = limit_c - temperature, self._resistance * (power_w - float(self._smooth_w[self._best]))
        if left <= 0.0:
            return 0.0
        return None if rise <= left else -float(_TIME_CONSTANTS_S[self._best]) * math.log1p(-left / rise)


class EnergyBudget:
    """The energy of one device, under the policy that `use` activated last."""

    def __init__(self, spend: SpendStore) -> None:
        self._spend = spend
        self._heat, self._pacer, self._state = HeatModel(), Pacer(), EnergyState()
        self._tokens = 0.0  # since the last sample
        self._idle, self._busy, self._draw = Ewma(900.0), Ewma(900.0), Ewma(30.0)  # W
        self._idle_w: float | None = None
        self._charge = Ewma(120.0)
        self._last_charge: float | None = None
        self._cloud_s, self._edge_s = Ewma(3600.0), Ewma(900.0)
        self._sampled = self._priced = self._saved = self._warned = float("-inf")
        self._policy: Policy | None = None
        self._since_h, self._until_h = 0.0, 24.0  # of the battery's day
        self.current = EnergySignals()
        """The signals as of the last `sample`."""

    async def load(self) -> None:
        """Load what earlier runs learned."""
        self._state = await self._spend.learned(ENERGY, EnergyState)
        self._pacer = Pacer(self._state.demand)

    def use(self, policy: Policy) -> None:
        """Follow another policy."""
        self._policy, battery = policy if policy.paces_energy else None, policy.battery
        self._since_h, self._until_h = 0.0, 24.0
        if battery is not None:
            self._since_h = hours(battery.since)
            self._until_h = (hours(battery.until) - self._since_h) % 24.0
        self.current = EnergySignals()

    def offer(self, steps: Steps) -> None:
        """Take note of a choice between targets, for the price of the next ones."""
        day, passed = self._spend.local(self._since_h)
        self._pacer.offer(steps, day, int(passed))

    def answered(self, attempts: Iterable[AttemptRecord], now: float) -> None:
        """Take the tokens and times of finished attempts into account. `now`: monotonic seconds."""
        for one in attempts:
            (self._edge_s if one.at == "edge" else self._cloud_s).add((one.duration_ms or 0.0) / 1000.0, now)
            self._tokens += one.tokens if one.at == "edge" else 0

    def sample(self, device: DeviceSignals, jobs: int, now: float) -> None:
        """Take the device's readings into account. `jobs`: unfinished answers on it; `now`: monotonic seconds."""
        dt, self._sampled = now - self._sampled, now
        power_w = self._draw.value(now) if device.power_w is None else device.power_w
        if dt > _GAP_S:
            self._last_charge = None
        elif power_w is not None:
            self._measure(device, power_w, jobs, dt, now)
        if self._policy is None:
            return
        if now - self._priced >= _REPRICED_S:
            self._priced = now
            self._heat.fit()
            self.current = self._signals(self._policy, device, jobs, now)
        if now - self._saved >= _SAVED_S:
            self._saved = now
            self._spend.remember(ENERGY, msgspec.structs.replace(self._state, demand=self._pacer.state()))

    def samples(self) -> Iterator[Sample]:
        """Yield the price of a watt-hour and the forecast of heat, for Prometheus."""
        known = self.current
        if known.price is not None:
            yield Sample("causeway_edge_energy_price", known.price, (("limit", known.limit),))
        if known.throttles_in_s is not None:
            yield Sample("causeway_edge_throttles_in_seconds", known.throttles_in_s)

    def _measure(self, device: DeviceSignals, power_w: float, jobs: int, dt: float, now: float) -> None:
        self._heat.observe(device.temperature_c, power_w, dt, now)
        if device.power_w is not None:
            self._draw.add(power_w, now)
            (self._busy if jobs else self._idle).add(power_w, now)
        self._idle_w = self._idle.value(now) or self._idle_w
        (_, drawn, fallen, excess, tokens), wh = msgspec.structs.astuple(self._state), power_w * dt / 3600.0
        if device.discharging is False:
            self._last_charge = None
        elif device.battery is not None:
            self._charge.add(device.battery, now)
            charge = self._charge.value(now) or 0.0
            if self._last_charge is not None:
                fallen += self._last_charge - charge
            self._last_charge = charge
        if self._last_charge is not None:
            drawn += wh
        if jobs and self._idle_w is not None:
            excess += wh - self._idle_w * dt / 3600.0
        tokens, self._tokens = tokens + self._tokens, 0.0
        kept, paid = min(1.0, _MEMORY / max(fallen, 1e-9)), min(1.0, _TOKENS / max(tokens, 1.0))
        self._state = EnergyState(self._state.demand, drawn * kept, fallen * kept, excess * paid, tokens * paid)

    def _signals(self, policy: Policy, device: DeviceSignals, jobs: int, now: float) -> EnergySignals:
        prices, (day, passed), state = {"": 0.0}, self._spend.local(self._since_h), self._state
        wh_left = self._battery_wh(policy, device, self._until_h - passed, now)
        if wh_left is not None:
            prices["battery"] = self._pacer.price(max(0.0, wh_left), day, passed, self._until_h)
        throttles_in_s = None
        if policy.heat is not None and (throttles_c := policy.heat.limit_c or device.throttles_c):
            limit_c = throttles_c - policy.heat.margin_c
            prices["heat"] = self._heat_price(limit_c, jobs, day, passed, now)
            throttles_in_s = self._heat.reaches_in_s(limit_c, self._draw.value(now) or 0.0, now)
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

    def _heat_price(self, limit_c: float, jobs: int, day: str, passed: float, now: float) -> float:
        """Return the price of heat: the highest if another answer on the device would reach the limit."""
        busy_w = self._busy.value(now) or self._draw.value(now) or 0.0
        in_s = self._heat.reaches_in_s(limit_c, busy_w, now)
        if in_s is not None and in_s <= (self._edge_s.value(now) or 0.0) * (jobs + 1):
            return MAX_PRICE
        allowed = self._heat.allowed(limit_c, now)
        if allowed is None or self._idle_w is None:
            return 0.0
        power_w, window_h = allowed[0], allowed[1] / 3600.0
        return self._pacer.price(max(0.0, power_w - self._idle_w) * window_h, day, passed, passed + window_h)
