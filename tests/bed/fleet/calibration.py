"""Measure the constants of `tests.bench.simulation.polls` on a control plane, and print the simulation beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import psutil

from tests.bench.simulation.polls import PollModel, revert_times

from ..figures import quantile
from .devices import SimulatedDevice


class Work(msgspec.Struct, frozen=True):
    """Requests of the devices until now, and the CPU time that the control plane has used for them, seconds."""

    requests: int
    cpu_s: float


def work(devices: Iterable[SimulatedDevice], pid: int) -> Work:
    used = psutil.Process(pid).cpu_times()
    return Work(sum(device.requests for device in devices), used.user + used.system)


def calibrated(before: Work, after: Work, publish_s: float, round_trip_s: float, activation_s: float) -> PollModel:
    """Return the model of this control plane, for a core of its own.

    Args:
        before: When all devices were told to revert.
        after: When all of them had.
        publish_s: From the decision to the first woken device.
        round_trip_s: Of one request to an idle control plane.
        activation_s: Of the simulated devices.
    """
    rate = (after.requests - before.requests) / max(after.cpu_s - before.cpu_s, 1e-9)
    return PollModel(
        requests_per_s=rate,
        publish_s=publish_s,
        round_trip_s=round_trip_s,
        activation_s=activation_s,
        devices_per_process=1_000_000,
    )


def calibration_rows(model: PollModel, reverted_s: Sequence[float]) -> list[list[object]]:
    """Return the constants, and the simulated revert of as many devices beside the measured one."""
    count = len(reverted_s)
    simulated = revert_times(np.random.default_rng(0), count, count, model).tolist()
    return [
        ["requests of a CPU second of the control plane", model.requests_per_s],
        ["from an abort to the first woken device, s", model.publish_s],
        ["round trip of an idle control plane, s", model.round_trip_s],
        *(
            [f"abort to reverted, simulated with these (measured {quantile(reverted_s, share):.3g}), {name} s",
             quantile(simulated, share)]
            for name, share in (("p50", 0.5), ("p99", 0.99))
        ),
    ]  # fmt: skip


def storm_rows(returned: float, reconnected: Sequence[float]) -> list[list[object]]:
    """Return how evenly devices came back to a control plane that was killed.

    Args:
        returned: When it answered again, monotonic seconds.
        reconnected: When each device had its first answer.
    """
    ordered = sorted(reconnected)[: max(1, int(0.99 * len(reconnected)))]
    seconds = Counter(math.floor(at - returned) for at in ordered)
    settled_s = max(seconds) + 1
    mean = len(ordered) / settled_s
    return [
        ["reconnects of the busiest second", max(seconds.values())],
        ["reconnects, peak over mean", max(seconds.values()) / mean],
        ["99 % of the devices are back after, s", settled_s],
    ]
