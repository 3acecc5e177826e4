"""The simulated devices: unequal on purpose, because equal ones would make every statistic look good."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from causeway_server.fleet.rollout.verdict import Observations
from causeway_server.router.bundle.manifest import position

LATENCY_BOUNDS_S = (0.5, 1.0, 2.0, 4.0)
DEVICES_OF_A_SITE = 25


@dataclass(frozen=True, slots=True)
class Effect:
    """What the new bundle changes on a device that runs it; the default changes nothing.

    Attributes:
        errors: Share of requests that fail in addition.
        slower: Factor on latency.
        silenced: Share of devices that never report again.
        rolled_back: Share of devices whose own trial undoes it; 0.002 happens to a good bundle too.
    """

    errors: float = 0.0
    slower: float = 1.0
    silenced: float = 0.0
    rolled_back: float = 0.002


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """Arrays with one entry a device.

    Attributes:
        positions: In the order of this rollout.
        rates: Requests per second: lognormal, and a tenth of the devices is idle.
        errors: Share of failing requests of a device's own: mostly far below 1 %, one device of fifty has up to 20 %.
        degraded: Share of degraded answers.
        speeds: Median latency, seconds.
        off_at: When the device goes dark, seconds; inf for most, before 0 for those that are off.
        cloned: Two machines with one identity: not in the verdict.
    """

    positions: NDArray[np.int64]
    rates: NDArray[np.float64]
    errors: NDArray[np.float64]
    degraded: NDArray[np.float64]
    speeds: NDArray[np.float64]
    off_at: NDArray[np.float64]
    cloned: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return int(self.positions.size)


def draw_devices(rng: np.random.Generator, devices: int, salt: str) -> SimulatedDevices:
    """Draw the devices; their positions are the real hash of the salt and the device's id."""
    flaky = rng.random(devices) < 0.02
    errors = np.where(flaky, rng.uniform(0.0, 0.2, devices), rng.beta(0.5, 200.0, devices))
    rates = np.where(rng.random(devices) < 0.1, 0.001, rng.lognormal(math.log(0.15), 0.8, devices))
    dark = rng.random(devices)
    # 3 % are off, and a device goes dark about once in 50 days.
    off_at = np.where(dark < 0.03, -1e9, rng.exponential(50 * 86_400.0, devices))
    return SimulatedDevices(
        positions=np.fromiter((position(salt, f"device-{index}") for index in range(devices)), np.int64, devices),
        rates=rates,
        errors=errors,
        degraded=rng.beta(0.5, 50.0, devices),
        speeds=rng.lognormal(math.log(0.6), 0.3, devices),
        off_at=off_at,
        cloned=rng.random(devices) < 0.001,
    )


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to all devices of a site, or to all devices, between two looks: the same on both sides of a
    rollout."""

    incident: float  # share of requests that fail everywhere
    site_down: NDArray[np.bool_]  # bool [sites]: half of the requests there fail


def draw_weather(rng: np.random.Generator, devices: int) -> Weather:
    incident = rng.uniform(0.0, 0.2) if rng.random() < 0.1 else 0.0
    return Weather(incident, rng.random(-(-devices // DEVICES_OF_A_SITE)) < 0.01)


def observe(
    rng: np.random.Generator,
    devices: SimulatedDevices,
    chosen: NDArray[np.int64],
    window: tuple[float, float],
    weather: Weather,
    silence_s: float,
    effect: Effect | None = None,
) -> Observations:
    """Draw what the chosen devices report of a window.

    Args:
        rng: Chance.
        devices: All devices.
        chosen: int64 [n], indices of the devices.
        window: From and until, seconds since the rollout began.
        weather: Of this window.
        silence_s: Of the settings.
        effect: Of the new bundle; None for the control.
    """
    begins, ends = window
    effect = effect or Effect()
    watched = np.clip(np.minimum(devices.off_at[chosen], ends) - begins, 0.0, None)
    spans = _latency_shares(devices.speeds[chosen] * effect.slower)
    latency = rng.poisson((devices.rates[chosen] * watched)[:, None] * spans)
    requests = latency.sum(axis=1)
    site_errors = 0.5 * weather.site_down[chosen // DEVICES_OF_A_SITE]
    chance = 1.0 - (1 - devices.errors[chosen]) * (1 - effect.errors) * (1 - weather.incident) * (1 - site_errors)
    return Observations(
        requests=requests.astype(np.int64),
        events={
            "errors": rng.binomial(requests, chance).astype(np.int64),
            "degraded": rng.binomial(requests, devices.degraded[chosen]).astype(np.int64),
        },
        latency=latency.astype(np.int64),
        silent=devices.off_at[chosen] < ends - silence_s,
    )


_LOGITS = np.log(np.array(LATENCY_BOUNDS_S))


def _latency_shares(speeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of requests in each bucket, float64 [devices, 5]: a logistic distribution of log latency, scale 0.3."""
    below = 1.0 / (1.0 + np.exp(-(_LOGITS[None, :] - np.log(speeds)[:, None]) / 0.3))
    return np.diff(below, axis=1, prepend=0.0, append=1.0)
