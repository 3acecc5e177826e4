"""A battery that must last until 18:00 and heat that must not throttle: paced, beside hindsight and a mere stop.

Two days each of 40 devices, in steps of 20 s: the sensors' files as a Jetson has them, read by the daemon's probes;
noise, readings that are missing, batteries that hold less than they say, fans that fail, clouds that are away. The
temperature follows a die on a heat sink (two time constants), which the model of one must do with. Each request is
decided by `decide`. A throttled device draws and makes half as much.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from causeway_server.edge_node.backends.backend import EngineWork
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.signals.device import CpuTimes, DeviceProbes
from causeway_server.edge_node.signals.energy import EnergyBudget
from causeway_server.edge_node.storage.spend import SpendStore
from causeway_server.router.decision.candidates import scores
from causeway_server.router.decision.decide import decide
from causeway_server.router.decision.pacing import steps_of
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import AttemptRecord, Candidate, Estimates, Message, Request, RoutingHints, Snapshot

from .rows import Row

CHOSEN, REPORTED = range(200, 240), range(8000, 8040)  # seeds
DAYS, STEP_S, FIRST, LAST = 2, 20.0, 6, 18
TRIP_C, USD = 85.0, 100.0
_POLICY = parse_policy(
    f"""
version: 1
name: cart
targets:
  small: {{at: edge, model: s}}
  large: {{at: cloud, model: l, price: {{output: 10}}}}
constraints: [{{name: private, keep: on_device, when: '"private" in request.tags'}}]
routes: [{{name: scored, use: {{best_of: [small, large], weights: {{usd: {USD}}}}}}}]
budget: {{battery: {{since: "06:00", until: "18:00"}}, heat: {{}}}}
"""
)
_WEIGHTS, _TARGETS = _POLICY.routes[0].best_of, _POLICY.targets
_BATTERY, _ZONE, _RAIL = "sys/class/power_supply/BAT0", "sys/class/thermal/thermal_zone0", "sys/class/hwmon/hwmon1"
FILES = {
    f"{_BATTERY}/type": "Battery",
    f"{_BATTERY}/status": "Discharging",
    f"{_ZONE}/type": "tj-thermal",
    f"{_ZONE}/trip_point_0_type": "passive",
    f"{_ZONE}/trip_point_0_temp": f"{TRIP_C * 1000:.0f}",
    f"{_RAIL}/name": "ina3221",
    f"{_RAIL}/in1_label": "VDD_IN",
    f"{_RAIL}/in1_input": "5000",
}


_READINGS = f"{_ZONE}/temp", f"{_BATTERY}/capacity", f"{_RAIL}/curr1_input"


def _no_work() -> CpuTimes:
    return CpuTimes(0.0, 0.0)


class Asked(NamedTuple):
    hours: float
    edge: float  # quality of the device's answer
    cloud: float
    tokens: int
    private: bool


class Device(NamedTuple):
    holds_wh: float
    stated_wh: float
    idle_w: float
    busy_w: float  # more than idle
    radio_w: float
    tokens_per_s: float
    die: tuple[float, float]  # °C/W, s
    sink: tuple[float, float]
    ambient_c: float
    chance: random.Random


class Day(NamedTuple):
    requests: list[Asked]
    warmer_c: float
    away: tuple[float, float]  # hours without a cloud
    fan_fails: float  # hour
    silent: dict[str, tuple[float, float]]  # hours without a sensor


class Result(NamedTuple):
    lasted: bool
    value: float
    best: float  # hindsight's
    throttled: float  # share of the hours
    least: float  # the same without an answer
    feasible: bool


def device_of(seed: int) -> Device:
    chance = random.Random(seed)
    idle_w, busy_w = chance.uniform(3.5, 6), chance.uniform(6, 10)
    holds_wh = idle_w * 12 / chance.uniform(0.4, 0.9)
    return Device(
        holds_wh,
        holds_wh / chance.uniform(0.65, 1.0),
        idle_w,
        busy_w,
        chance.uniform(0.5, 2.5),
        chance.uniform(8, 25),
        (chance.uniform(0.6, 1.4), chance.uniform(8, 20)),
        (chance.uniform(1.5, 3.0), chance.uniform(200, 900)),
        chance.uniform(16, 40),
        chance,
    )


def day_of(device: Device) -> Day:
    chance, peak = device.chance, device.chance.uniform(9, 15)
    seconds = chance.uniform(0.2, 0.9) * (LAST - FIRST) * 3600  # of the device, if it made every answer
    count = int(seconds * device.tokens_per_s / 150)
    weights = [1 + 3 * math.exp(-(((hour - peak) / 3) ** 2)) for hour in range(FIRST, LAST)]
    requests = [
        Asked(
            hour + chance.random(),
            chance.betavariate(3, 3) if chance.random() < 0.4 else chance.betavariate(9, 1.5),
            min(1.0, max(0.0, chance.gauss(0.92, 0.04))),
            max(5, int(chance.lognormvariate(math.log(120), 0.65))),
            chance.random() < 0.1,
        )
        for hour in chance.choices(range(FIRST, LAST), weights=weights, k=count)
    ]
    away, lost = chance.uniform(FIRST, LAST), chance.uniform(FIRST, LAST)
    return Day(
        sorted(requests),
        chance.gauss(0, 2),
        (away, away + chance.choice((0.0, 0.0, 0.5, 2.0))),
        chance.uniform(FIRST, LAST) if chance.random() < 0.15 else 99.0,
        {chance.choice(("temp", "capacity", "curr1_input")): (lost, lost + 0.2)},
    )


class Machine:
    """What happens: charge, temperatures, work; and the files of the sensors."""

    def __init__(self, device: Device, day: Day, root: Path, seed: int) -> None:
        self.device, self.day = device, day
        self._files = {name: os.open(root / name, os.O_CREAT | os.O_WRONLY) for name in _READINGS}
        self._chance = random.Random(seed)
        self.left_wh = device.holds_wh
        self.queue: deque[float] = deque()  # tokens that are left to make
        self.sink_c = self.die_c = self._ambient(FIRST) + device.idle_w * 3
        self.throttled = False
        self._radio_s = 0.0
        self.jobs = 0  # at the moment of the reading
        self.made = 0  # tokens of answers that ended

    def step(self, hours: float) -> list[float]:
        """Go on for a step; return the tokens of answers that ended."""
        device, ended, left_s = self.device, [], STEP_S
        speed = 0.5 if self.throttled else 1.0
        while self.queue and left_s > 0.0:
            made = min(self.queue[0], left_s * device.tokens_per_s * speed)
            left_s -= made / (device.tokens_per_s * speed)
            self.queue[0] -= made
            if self.queue[0] <= 1e-9:
                ended.append(self.queue.popleft())
        self.jobs = int(self._chance.random() >= left_s / STEP_S) * (1 + len(self.queue))
        radio_s, self._radio_s = min(STEP_S, self._radio_s), max(0.0, self._radio_s - STEP_S)
        power_w = self.idle_w(hours) + device.busy_w * speed * (1 - left_s / STEP_S) + device.radio_w * radio_s / STEP_S
        self.left_wh -= power_w * STEP_S / 3600
        fails = 1.8 if hours >= self.day.fan_fails else 1.0
        target_c = self._ambient(hours) + device.sink[0] * fails * power_w
        self.sink_c += (target_c - self.sink_c) * -math.expm1(-STEP_S / (device.sink[1] * fails))
        self.die_c += (self.sink_c + device.die[0] * power_w - self.die_c) * -math.expm1(-STEP_S / device.die[1])
        self.throttled = self.die_c >= TRIP_C - (2.0 if self.throttled else 0.0)
        return ended

    def call(self, tokens: int) -> None:
        self._radio_s += 0.5 + tokens / 60

    def idle_w(self, hours: float) -> float:
        return self.device.idle_w * (1.1 if 10 <= hours < 16 else 1.0)

    def _ambient(self, hours: float) -> float:
        return self.device.ambient_c + self.day.warmer_c + 5 * math.sin((hours - 9) / 12 * math.pi)

    def write(self, hours: float) -> None:
        """Write the files of the sensors, as they read at this moment."""
        gauss, device = self._chance.gauss, self.device
        working = device.busy_w * (0.5 if self.throttled else 1.0) if self.jobs else 0.0
        power_w = self.idle_w(hours) + working + (device.radio_w if self._radio_s else 0.0)
        charge = 100 * self.left_wh / device.holds_wh + gauss(0, 0.7)
        self._put(_ZONE, "temp", (self.die_c + gauss(0, 0.4)) * 1000, hours)
        self._put(_BATTERY, "capacity", max(0, min(100, charge)), hours)
        self._put(_RAIL, "curr1_input", max(0.0, power_w * (1 + gauss(0, 0.03))) / 5 * 1000, hours)

    def _put(self, folder: str, name: str, value: float, hours: float) -> None:
        begin, end = self.day.silent.get(name, (0.0, 0.0))
        is_silent = self._chance.random() < 0.03 or begin <= hours < end
        text = "" if is_silent else f"{value:.0f}"
        os.pwrite(self._files[f"{folder}/{name}"], f"{text:12}\n".encode(), 0)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


def plant(root: Path, device: Device) -> None:
    files = {**FILES, f"{_BATTERY}/energy_full": f"{device.stated_wh * 1e6:.0f}"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def score(one: Asked) -> float:
    """Return the value of the cloud's answer."""
    return one.cloud - USD * one.tokens * 10 / 1e6


def live(
    device: Device, day: Day, root: Path, seed: int, energy: EnergyBudget, clock: list[float], *, paced: bool
) -> Result:
    """Return what a day gains. `paced`: whether answers have a price, or only stop."""
    machine, ahead = Machine(device, day, root, seed), deque(day.requests)
    probes = DeviceProbes(root, cpu_times=_no_work, available_bytes=int)
    hours, value, hot, idle_wh, lengths = float(FIRST), 0.0, 0, 0.0, deque[int]()
    steps = int((LAST - FIRST) * 3600 / STEP_S)
    lasted = True
    for _ in range(steps):
        idle_wh += machine.idle_w(hours) * STEP_S / 3600
        for _ in machine.step(hours):
            tokens = lengths.popleft()
            took_ms = 1000 * tokens / device.tokens_per_s
            energy.answered([AttemptRecord("small", "edge", "done", 0.0, 0.0, took_ms)], clock[0])
            machine.made += tokens
        lasted = lasted and machine.left_wh > 0.0
        hot += machine.throttled
        hours += STEP_S / 3600
        clock[0] += STEP_S
        if not lasted:
            break
        machine.write(hours)
        work = EngineWork(machine.jobs, machine.jobs, machine.made)
        energy.sample(probes.read(clock[0]), work, clock[0])
        while ahead and ahead[0].hours <= hours:
            one = ahead.popleft()
            value += ask(one, machine, energy, lengths, hours, clock[0], paced=paced)
    machine.close()
    away = day.away
    best = hindsight(device, day, device.holds_wh - idle_wh, away)
    cold = Machine(device, day, root, seed)
    cold.close()
    cold_hot = 0
    for number in range(steps):
        cold.step(FIRST + number * STEP_S / 3600)
        cold_hot += cold.throttled
    return Result(lasted, value, best, hot / steps, cold_hot / steps, cold.left_wh > 0.0)


def ask(
    one: Asked, machine: Machine, energy: EnergyBudget, lengths: deque[int], hours: float, now: float, *, paced: bool
) -> float:
    """Decide a request, and begin its answer; return its value."""
    told = energy.current
    if not paced:
        told = msgspec.structs.replace(told, price=None)
    is_away = machine.day.away[0] <= hours < machine.day.away[1]
    tags = ("private",) if one.private else ()
    request = Request(kind="chat", model="auto", messages=(Message("user", "?"),), hints=RoutingHints(tags=tags))
    found = Candidate("edge", "s", one.edge, float(one.tokens)), Candidate("cloud", "l", one.cloud, float(one.tokens))
    estimates = Estimates(prompt_tokens=20, candidates=found)
    snapshot = Snapshot(energy=told, down=frozenset(("large",)) if is_away else frozenset())
    decision = decide(_POLICY, request, snapshot, estimates)
    listed = [target for target in _TARGETS if not (target.at == "cloud" and (is_away or one.private))]
    costs = scores(tuple(listed), "", _WEIGHTS, request, (snapshot, estimates), [])  # type: ignore[arg-type]
    energy.offer(steps_of((gain, wh) for gain, _, wh, _ in costs))
    target = next((plan.target for plan in decision.attempts if plan.target.at == "edge" or not is_away), None)
    if target is None:
        return 0.0
    if target.at == "edge":
        machine.queue.append(float(one.tokens))
        lengths.append(one.tokens)
        return one.edge
    machine.call(one.tokens)
    took_ms = 1000 * (0.5 + one.tokens / 60)
    energy.answered([AttemptRecord("large", "cloud", "done", 0.0, 0.0, took_ms, one.tokens)], now)
    return score(one)


def hindsight(device: Device, day: Day, left_wh: float, away: tuple[float, float]) -> float:
    """Return the most that the battery can gain, with parts of an answer allowed and heat left aside."""
    steps: list[tuple[float, float]] = []
    for one in day.requests:
        offers = [(0.0, 0.0), (one.edge, one.tokens / device.tokens_per_s * device.busy_w / 3600)]
        if not one.private and not away[0] <= one.hours < away[1]:
            offers.append((score(one), device.radio_w * (0.5 + one.tokens / 60) / 3600))
        steps += steps_of(offers).steps
    gained = 0.0
    for ratio, wh in sorted(steps, reverse=True):
        part = min(1.0, max(0.0, left_wh) / wh)
        gained, left_wh = gained + part * ratio * wh, left_wh - part * wh
    return gained


def run(seed: int, *, paced: bool, days: int = DAYS) -> list[Result]:
    device, clock, found = device_of(seed), [0.0], []
    spend = SpendStore(None, Clock(monotonic=lambda: clock[0], unix=lambda: clock[0]))
    energy = EnergyBudget(spend)
    energy.use(_POLICY)
    root = Path(tempfile.mkdtemp())
    try:
        plant(root, device)
        for number in range(days):
            clock[0] = time.mktime((2026, 6, 1 + number, FIRST, 0, 0, 0, 0, -1))
            found.append(live(device, day_of(device), root, seed * 10 + number, energy, clock, paced=paced))
    finally:
        shutil.rmtree(root)
    return found


def main(seeds: Sequence[int] = REPORTED, days: int = DAYS) -> list[Row]:
    paced = [one for seed in seeds for one in run(seed, paced=True, days=days)]
    stopped = [one for seed in seeds for one in run(seed, paced=False, days=days)]
    could = [(one, other) for one, other in zip(paced, stopped, strict=True) if one.feasible]
    mean = statistics.mean
    hot, least, without = (
        mean(found) for found in zip(*((a.throttled, a.least, b.throttled) for a, b in could), strict=True)
    )
    share = mean(one.value / one.best for one, _ in could)
    lasted = sum(one.lasted for one, _ in could)
    note = f"{lasted} of {len(could)} days; {sum(one.lasted for _, one in could)} if answers only stop at the budget"
    return [
        Row(
            "days on which the battery lasts ÷ days on which any plan could make it last",
            lasted / len(could),
            "x",
            0.99,
            "higher",
            note,
        ),
        Row(
            "share of the hours in which the device is throttled",
            100 * hot,
            "%",
            2.0,
            note=f"without any answer {100 * least:.2f} %, unpaced {100 * without:.2f} %",
        ),
        Row("value of the answers ÷ the value with hindsight", share, "x"),
        Row(
            "value of the answers ÷ the value if answers only stop at the budget",
            mean(one.value / max(1e-9, other.value) for one, other in could),
            "x",
        ),
    ]
