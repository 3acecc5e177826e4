"""Polls, wakes and reconnects of many devices as arrays of times; all chance comes from the generator given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PollModel:
    """How devices and control plane speak. Defaults are the agent's, or measured by `python -m tests.bench rollouts`.

    Attributes:
        devices_per_process: Parked long polls in one process; processes answer in parallel.
        requests_per_s: Wakes, files, status posts or refusals that one process answers, on a core of its own.
        wait_s: Longest long poll; a device asks for a random time between half of it and all of it.
        round_trip_s: Median; lognormal.
        publish_s: From the decision to a signed plan.
        fetches: Requests of each woken device, one after another, for metadata and the plan.
        activation_s: Median time to make the bundle before active again, which is still in the device's store;
            lognormal.
        reconnect_s: The wait before reconnecting is random up to this.
        reconnect_growth: Factor on that after each failure.
        reconnect_most_s: The bound on that, seconds.
        reconnecting: Share of devices that are between two connections at any time.
    """

    devices_per_process: int = 15_000
    requests_per_s: float = 2_800.0
    wait_s: float = 300.0
    round_trip_s: float = 0.08
    publish_s: float = 1.0
    fetches: int = 5
    activation_s: float = 4.0
    reconnect_s: float = 60.0
    reconnect_growth: float = 1.0
    reconnect_most_s: float = 300.0
    reconnecting: float = 0.01

    def answer_rate(self, devices: int) -> float:
        """Answers in a second by as many processes as the devices need."""
        return self.requests_per_s * -(-devices // self.devices_per_process)


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals at the control plane in the busiest second and on average, over `settled_s` seconds."""

    peak_per_s: float
    mean_per_s: float
    settled_s: float

    @property
    def peak_over_mean(self) -> float:
        return self.peak_per_s / self.mean_per_s


def told_times(rng: np.random.Generator, devices: int, fleet: int, model: PollModel) -> Times:
    """Return when each device has the new plan, seconds after a decision.

    Args:
        rng: Chance.
        devices: Devices to tell.
        fleet: All devices with a parked poll: each is woken and reads the plan, since its change concerns all.
        model: The model.
    """
    return _told(rng, devices, fleet, model)[0]


def revert_times(rng: np.random.Generator, devices: int, fleet: int, model: PollModel) -> Times:
    """Return when each device has reported that it runs the bundle before, seconds after a verdict of fail."""
    rate = model.answer_rate(fleet)
    told, busy_until = _told(rng, devices, fleet, model)
    permitted = served(np.maximum(told, busy_until), rate) + _trips(rng, devices, model)
    return served(permitted + rng.lognormal(np.log(model.activation_s), 0.5, devices), rate) + _trips(
        rng, devices, model
    )


def _told(rng: np.random.Generator, devices: int, fleet: int, model: PollModel) -> tuple[Times, float]:
    """Return when each of the devices has the plan, and when the control plane has answered what all devices asked."""
    rate = model.answer_rate(fleet)
    late = rng.random(fleet) < model.reconnecting  # between two connections: a few, which come when the rush is over
    times = np.full(fleet, model.publish_s)
    times[late] += rng.uniform(0.0, model.reconnect_s, int(late.sum()))
    busy_until = 0.0
    for _ in range(1 + model.fetches):
        # All devices are woken at once: each of their requests queues behind those that all devices sent before.
        answered = times + 1 / rate
        answered[~late] = served(np.maximum(times[~late], busy_until), rate)
        busy_until = float(answered[~late].max(initial=busy_until))
        times = answered + _trips(rng, fleet, model)
    return np.asarray(rng.choice(times, size=devices, replace=False), dtype=np.float64), busy_until


def _trips(rng: np.random.Generator, count: int, model: PollModel) -> Times:
    return rng.lognormal(np.log(model.round_trip_s), 0.7, count)


def served(arrivals: Times, rate: float) -> Times:
    """Return when each arrival has been answered by a server that answers `rate` a second, first come first served."""
    order = np.argsort(arrivals, kind="stable")
    slots = np.arange(arrivals.size) / rate
    # A queue's end: each is answered 1/rate after the one before, or after its own arrival.
    finished = np.maximum.accumulate(arrivals[order] - slots) + slots + 1 / rate
    times = np.empty_like(arrivals)
    times[order] = finished
    return times


def reconnect_storm(rng: np.random.Generator, devices: int, outage_s: float, model: PollModel) -> Load:
    """All devices lose their connection at once, and the control plane is back after `outage_s`.

    Each attempt waits a random time from 0 ("full jitter": Brooker, "Exponential Backoff And Jitter", AWS Architecture
    Blog, 2015). Growing waits make the storm worse here: the first devices come at their old rate, the last ones late,
    so that the peak is far above the mean.

    Returns:
        The load from the return of the control plane until 99 % of the devices are connected.
    """
    capacity = model.answer_rate(devices)
    due = rng.uniform(0.0, model.reconnect_s, devices)
    attempts = np.zeros(devices, dtype=np.int64)
    arrivals: list[int] = []
    connected, second, settled_at = 0, 0, 0
    while connected < devices:
        now = np.flatnonzero((due >= second) & (due < second + 1))
        arrivals.append(now.size)
        rng.shuffle(now)
        room = int(capacity) if second >= outage_s else 0
        connected += min(room, now.size)
        refused = now[room:]
        due[now] = np.inf
        attempts[refused] += 1
        longest = np.minimum(model.reconnect_most_s, model.reconnect_s * model.reconnect_growth ** attempts[refused])
        due[refused] = second + 1 + rng.uniform(0.0, longest)
        second += 1
        if not settled_at and connected >= 0.99 * devices:
            settled_at = second
    counted = np.array(arrivals[int(outage_s) : settled_at])
    return Load(float(counted.max()), float(counted.mean()), settled_at - outage_s)


def polls_after_wake(rng: np.random.Generator, devices: int, duration_s: float, model: PollModel) -> Load:
    """All devices were just woken: how their next polls spread over `duration_s`."""
    counts = np.zeros(int(duration_s), dtype=np.int64)
    due = rng.uniform(0.0, 2.0, devices)
    while due.size:
        due = due + rng.uniform(model.wait_s / 2, model.wait_s, due.size)
        due = due[due < counts.size]
        counts += np.bincount(due.astype(np.int64), minlength=counts.size)
    # The first polls come after half the longest wait; before, there is nothing to count.
    counted = counts[int(model.wait_s / 2) :]
    return Load(float(counted.max()), float(counted.mean()), model.wait_s)
