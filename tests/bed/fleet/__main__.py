"""Rollouts over thousands of simulated devices and a real control plane, in real time.

python -m tests.bench rollouts --devices 5000

1. A first bundle, to all devices at once.
2. A bundle under which 5 % more answers fail: it has to stop at its first stage and undo itself.
3. A good bundle, to all devices at once; then an operator aborts it: every device returns. What this costs the control
   plane calibrates `tests.bench.simulation.polls`, whose own figure is printed beside it.
4. The control plane is killed and started again: all devices reconnect.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.fleet.trust.published import PublishedFolder
from causeway_server.router.bundle.manifest import bundle_id
from tests.bed.figures import quantile, table
from tests.bed.fleet.demo import (
    CAUSEWAY_FLEET,
    COHORT,
    OFFLINE,
    ONLINE,
    Pace,
    Program,
    run_command,
    write_fleet,
    write_folder,
    write_policy,
)
from tests.bench.rows import Row
from tests.ports import free_port

from .calibration import calibrated, calibration_rows, storm_rows, work
from .devices import Behaviour, SimulatedDevice

ENROLLING = 64
TIMEOUT_S = 900.0
TELEMETRY_S = 20.0
STAGES = Pace(stages=(1, 5, 25, 50, 100), first_look="30s", errors=2)
AT_ONCE = msgspec.structs.replace(STAGES, stages=(100,))
_ENDED = ("done", "reverted", "draft")


class FleetBed:
    """A control plane, its fleet's folder, and simulated devices."""

    def __init__(self, folder: Path, devices: int) -> None:
        self._fleet = folder / "stores"
        self._folder = folder
        self._count = devices
        self.devices: list[SimulatedDevice] = []
        self._http: aiohttp.ClientSession
        self._listen = f"127.0.0.1:{free_port()}"
        self._url = f"http://{self._listen}"
        self._headers: dict[str, str] = {}
        self.program: Program

    def start(self) -> None:
        write_folder(self._fleet)
        write_policy(self._fleet, "first")
        for name in (*OFFLINE, ONLINE):
            run_command(*CAUSEWAY_FLEET, "keys", "new", name, "--keys", str(self._fleet / "keys"))
        self.sign("first", AT_ONCE)
        self.serve()
        token = (self._folder / "data" / "bootstrap-token").read_text(encoding="utf-8").strip()
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def serve(self) -> None:
        """Start the control plane, and wait until it is ready."""
        command = [*CAUSEWAY_FLEET, "serve", str(self._fleet), "--keys", str(self._fleet / "keys")]
        command += ["--state-dir", str(self._folder / "data"), "--listen", self._listen]
        self.program = Program("control plane", command, self._folder / "control-plane.log")
        self.program.ready()

    async def kill_and_start(self) -> float:
        """Kill the control plane and start it again; return when it was ready, monotonic."""
        await asyncio.to_thread(psutil.Process(self.program.pid).kill)
        await asyncio.to_thread(self.program.wait)
        await asyncio.to_thread(self.serve)
        return time.monotonic()

    def sign(self, policy: str, pace: Pace) -> str:
        """Sign a policy and return its bundle."""
        write_policy(self._fleet, policy)
        write_fleet(self._fleet, pace)
        keys = [part for name in ("anna", "ben", ONLINE) for part in ("--key", str(self._fleet / f"keys/{name}.pem"))]
        run_command(*CAUSEWAY_FLEET, "sign", str(self._fleet), *keys)
        return bundle_id(signed_manifests(PublishedFolder(self._fleet))[COHORT])

    async def enrol(self, http: aiohttp.ClientSession, behaviour: Behaviour) -> float:
        """Enrol all devices; return how many a second."""
        self._http = http
        asked = {"uses": self._count, "expires_s": 3600.0}
        token = (await self.api("POST", "/v1/join-tokens", asked))["token"]
        self.devices = [
            SimulatedDevice(http, self._url, f"device-{number:05}", f"seed-{number}", behaviour)
            for number in range(self._count)
        ]
        slots = asyncio.Semaphore(ENROLLING)

        async def one(device: SimulatedDevice) -> None:
            async with slots:
                await device.enrol(token)

        began = time.monotonic()
        await asyncio.gather(*map(one, self.devices))
        return self._count / (time.monotonic() - began)

    async def roll_out(self, bundle: str) -> dict[str, Any]:
        """Begin a rollout and watch it to its end; `aborted` is when the verdict was seen, monotonic."""
        found = await self.api("POST", "/v1/rollouts", {"cohort": COHORT, "to_bundle": bundle, "without_replay": True})
        ends, shown, aborted, began = time.monotonic() + TIMEOUT_S, "", 0.0, time.monotonic()
        while True:
            found = await self.api("GET", f"/v1/rollouts/{found['id']}")
            line = f"{found['state']} {found['stage'] + 1} of {len(found['stages'])}: {found['reason'][:150]}"
            if line != shown:
                print(f"  {time.monotonic() - began:5.0f} s  {line}", flush=True)
                shown = line
            if found["state"] in ("aborted", "reverting", "reverted") and not aborted:
                aborted = time.monotonic()
            if found["state"] == "paused":
                await self.api("POST", f"/v1/rollouts/{found['id']}/accept", {"reason": "inconclusive"})
            if found["state"] in _ENDED:
                return {**found, "aborted": aborted, "began": began}
            if time.monotonic() > ends:
                raise TimeoutError(f"rollout {found['id']} is {line}")
            await asyncio.sleep(0.5)

    async def abort(self, rollout: str) -> float:
        """Abort a rollout; return when."""
        began = time.monotonic()
        await self.api("POST", f"/v1/rollouts/{rollout}/abort", {"reason": "emergency"})
        return began

    async def until(self, what: str, holds: Callable[[SimulatedDevice], bool]) -> None:
        """Wait until something holds for every device."""
        ends = time.monotonic() + TIMEOUT_S
        while late := sum(not holds(device) for device in self.devices):
            if time.monotonic() > ends:
                raise TimeoutError(f"{late} devices: not {what}")
            await asyncio.sleep(0.2)

    async def until_running(self, bundle: str) -> None:
        await self.until(f"running {bundle}", lambda device: device.running == bundle)

    async def round_trip_s(self, tries: int = 200) -> float:
        """Return the median time of a request for a small file."""
        took = []
        for _ in range(tries):
            began = time.monotonic()
            async with self._http.get(f"{self._url}/tuf/metadata/timestamp.json") as answer:
                await answer.read()
            took.append(time.monotonic() - began)
        return quantile(took, 0.5)

    async def api(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        async with self._http.request(method, self._url + path, data=data, headers=self._headers) as answer:
            found = await answer.read()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {found.decode(errors='replace')[:300]}")
            return msgspec.json.decode(found)


async def run(folder: Path, count: int) -> None:
    bed = FleetBed(folder, count)
    await asyncio.to_thread(bed.start)
    # Bad bundles are known by their order: the second one is bad.
    bad = await asyncio.to_thread(bed.sign, "bad", STAGES)
    first = await asyncio.to_thread(bed.sign, "first", AT_ONCE)
    behaviour = Behaviour(telemetry_interval_s=TELEMETRY_S, bad_errors={bad: 0.05})
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=75.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60.0, sock_read=400.0)
    rows: list[list[object]] = []
    lives: asyncio.Future[Any] | None = None
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        try:
            rows.append(["enrolments a second", await bed.enrol(http, behaviour)])
            gc.freeze()  # a full collection over all devices stops their clocks for 0.7 s
            lives = asyncio.gather(*(device.live() for device in bed.devices))
            await asyncio.sleep(2 * TELEMETRY_S)
            rows.append(["control plane with all polls parked, MB", _memory_mb(bed.program.pid)])
            round_trip_s = await bed.round_trip_s()
            print("first bundle, to all at once", flush=True)
            done = await bed.roll_out(first)
            changed = [device.changed - done["began"] for device in bed.devices]
            rows.append(["from `apply` to running on all devices, p50 s", quantile(changed, 0.5)])
            rows.append(["the same, p99 s", quantile(changed, 0.99)])
            print("a bundle under which 5 % more answers fail", flush=True)
            await asyncio.to_thread(bed.sign, "bad", STAGES)
            verdict = await bed.roll_out(bad)
            reached = [device for device in bed.devices if bad in device.ran]
            await bed.until_running(first)
            back = [device.changed - verdict["aborted"] for device in reached]
            rows.append(["devices that the bad bundle reached", len(reached)])
            rows.append(["stage reached (1 is the first)", verdict["stage"] + 1])
            rows.append(["verdict of fail after, s", verdict["aborted"] - verdict["began"]])
            rows.append(["from the verdict to reverted, p99 s", quantile(back, 0.99)])
            print("a good bundle, to all at once, and an operator's abort", flush=True)
            good = await asyncio.to_thread(bed.sign, "second", AT_ONCE)
            done = await bed.roll_out(good)
            before = work(bed.devices, bed.program.pid)
            began = await bed.abort(done["id"])
            await bed.until_running(first)
            back = [device.changed - began for device in bed.devices]
            publish_s = min(device.woken for device in bed.devices if device.woken > began) - began
            after = work(bed.devices, bed.program.pid)
            model = calibrated(before, after, publish_s, round_trip_s, behaviour.activation_s)
            rows.append([f"from an abort to reverted, {count} devices, p50 s", quantile(back, 0.5)])
            rows.append(["the same, p99 s", quantile(back, 0.99)])
            rows += calibration_rows(model, back)
            rows.append(["control plane at the end, MB", _memory_mb(bed.program.pid)])
            failures = [failure for device in bed.devices for failure in device.failures]
            rows.append(["requests of the devices", sum(device.requests for device in bed.devices)])
            rows.append(["failed requests", len(failures)])
            print("the control plane is killed and started again", flush=True)
            await asyncio.sleep(behaviour.trial_s + 30.0)  # until most devices wait in their next poll
            cut, killed = {device for device in bed.devices if device.is_parked}, time.monotonic()
            returned = await bed.kill_and_start()
            await bed.until("connected", lambda device: device.connected > killed or device not in cut)
            rows.append(["devices that waited in a poll at the kill", len(cut)])
            rows += storm_rows(returned, [device.connected for device in cut])
            print(table(["figure", "value"], rows))
            print("\n".join(sorted(set(failures))[:10]))
        finally:
            if lives is not None:
                lives.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await lives
            bed.program.stop()
            await asyncio.to_thread(bed.program.wait)


def _memory_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / 1e6)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, default=5000)


def main(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="fleet-bed-") as folder:
        asyncio.run(run(Path(folder), options.devices))
    return []
