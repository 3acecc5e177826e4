"""A control plane as a process, and devices that speak the real protocol: keys, signatures, tokens, verified plans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import httpx
import msgspec
import pytest

from causeway_server.edge_node.agent.verifier import UpdateVerifier
from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.router.bundle.manifest import RolloutPlan, assigned_bundle, bundle_id
from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S, DeviceState, TelemetrySample
from causeway_server.router.bundle.refusals import UpdateRefused, UpdateUnavailable
from tests.fleet.repository.fleets import edit
from tests.fleet.server.device import Device
from tests.fleet.trust.signed_fleet import SignedFleet

from .conftest import PACE, operated_fleet
from .process import Process

pytestmark = pytest.mark.slow

DEVICES = (
    40  # fewer could be drawn so unevenly that no number of errors is significant: 1 in 150 rollouts of 24 devices
)
QUICK = "rollout: {stages: [50, 100], least: 6s, most: 40s, soak: 2s, first_look: 1s, silence: 5s}"
TURN_S = 0.3


class LiveDevice:
    """One device: it obeys what it has verified, and reports it. Lost connections cost it nothing but time.

    `bad`: bundles under which 40 % of its requests fail. `history`: what it ran, one after the other.
    """

    def __init__(self, device: Device, files: httpx.Client, root: bytes, folder: Path, bad: set[str]) -> None:
        self._device = device
        self._files = files
        self._root = root
        self._folder = folder
        self._bad = bad
        self.running: str | None = None
        self.history: list[str | None] = [None]
        self.refused: list[str] = []
        self._plan: RolloutPlan | None = None
        self._etag = ""

    async def live(self) -> None:
        while True:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._turn()
            await asyncio.sleep(TURN_S)

    async def _turn(self) -> None:
        woken = await self._device.wake(self._etag)
        if woken.status == 401:
            await self._device.ask_token()
            return
        if woken.status == 200:
            try:
                self._plan = await asyncio.to_thread(self._verified)
                self._etag = woken.headers["etag"]
            except UpdateUnavailable:
                return  # the control plane is gone again
            except UpdateRefused as error:
                self.refused.append(error.code)
        wanted = self.running
        if self._plan is not None:
            wanted = assigned_bundle(self._plan, self._device.name, self.running)
        rollout = "" if self._plan is None else self._plan.rollout
        if wanted != self.running:
            state = {"state": DeviceState.STAGE, "running": self.running, "wanted": wanted, "rollout": rollout}
            reply = await self._device.report(**state)
            if reply.status == 200 and reply.body["may_change"]:
                self.running = wanted
                self.history.append(wanted)
        await self._device.report(running=self.running, rollout=rollout)
        failed = 12 if self.running in self._bad else 0
        latency = (30, *(0 for _ in LATENCY_BOUNDS_S))
        await self._device.count(
            TelemetrySample(
                bundle=self.running, began=0.0, ended=1.0, requests=30, errors=failed, degraded=0, latency=latency
            )
        )

    def _verified(self) -> RolloutPlan | None:
        verifier = UpdateVerifier(self._folder, self._root, self._fetch, lambda: 0.0)
        verifier.refresh()
        return verifier.plan("kiosk")

    def _fetch(self, path: str) -> Iterator[bytes]:
        try:
            response = self._files.get(path)
            if response.status_code != 404:
                response.raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(str(error)) from error
        if response.status_code == 404:
            raise FileNotFoundError(path)
        yield response.content


@asynccontextmanager
async def devices_of(process: Process, folder: Path, bad: set[str]) -> AsyncIterator[list[LiveDevice]]:
    """Enrol the devices with a token of the command, and let them live."""
    token = (await asyncio.to_thread(process.done, "enroll", "--cohort", "kiosk", "--uses", str(DEVICES))).split()[0]
    timeout = aiohttp.ClientTimeout(total=60)
    async with AsyncExitStack() as stack:
        files = stack.enter_context(httpx.Client(base_url=process.url, trust_env=False))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        live = []
        for index in range(DEVICES):
            device = Device(http, process.url, f"device-{index}")
            enrolment = await device.enrol(token)
            assert enrolment.status == 200, enrolment.body
            await device.ask_token()
            live.append(LiveDevice(device, files, enrolment.body["root"].encode(), folder / device.name, bad))
        running = [tasks.create_task(one.live()) for one in live]
        yield live
        for task in running:
            task.cancel()


async def rollout(process: Process, path: Path, *, accepts: bool, kills: int = 0) -> str:
    """Apply the folder and return how it ended. Kill the control plane so many times.

    `accepts`: an approver accepts stages that a busy machine left without a verdict. A paused rollout is still judged.
    """
    await asyncio.to_thread(process.done, "apply", str(path), "--cohort", "kiosk", "--without-replay", "--yes")
    for turn in range(600):
        if turn % 5 == 4 and kills:
            await asyncio.to_thread(process.kill)
            await asyncio.to_thread(process.start)
            kills -= 1
        shown = await asyncio.to_thread(process.done, "status", "kiosk", "--format", "json")
        found = msgspec.json.decode(shown)
        if found["state"] in ("done", "reverted"):
            return str(found["state"])
        assert found["state"] != "draft", found["reason"]
        if found["state"] == "paused" and accepts:
            await asyncio.to_thread(process.done, "accept", "kiosk")
        await asyncio.sleep(0.3)
    raise AssertionError(found)


async def all_run(live: list[LiveDevice], bundle: str) -> None:
    """Return when every device runs the bundle: a rollout does not wait for one that a busy machine kept silent."""
    async with asyncio.timeout(60.0):
        while {one.running for one in live} != {bundle}:  # noqa: ASYNC110 -- of 40 tasks
            await asyncio.sleep(TURN_S)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    signed = operated_fleet(tmp_path)
    edit(signed.path / "fleet.yaml", PACE, QUICK)
    one = Process(signed)
    yield one
    one.kill()


def bundle_of(signed: SignedFleet) -> str:
    return bundle_id(signed_manifests(signed.published)["kiosk"])


async def test_a_good_rollout_over_killed_controllers_and_a_bad_one_that_is_undone(
    process: Process, tmp_path: Path
) -> None:
    """The control plane is killed three times meanwhile. The bad bundle reaches no device beyond its first stage."""
    signed, bad = process.signed, set[str]()
    async with devices_of(process, tmp_path / "devices", bad) as live:
        good = bundle_of(signed)
        assert await rollout(process, signed.path, accepts=True, kills=3) == "done"
        await all_run(live, good)
        edit(signed.path / "policies" / "kiosk.yaml", "device", "on-device")
        edit(signed.path / "policies" / "cases" / "kiosk.yaml", "route: device", "route: on-device")
        signed.sign("anna", "ben")
        worse = bundle_of(signed)
        bad.add(worse)
        assert await rollout(process, signed.path, accepts=False) == "reverted"
        await all_run(live, good)
        reached = sum(worse in one.history for one in live)
        assert 0 < reached < DEVICES
        assert {tuple(one.history) for one in live} <= {(None, good), (None, good, worse, good)}
        assert [code for one in live for code in one.refused] == []
        assert "chain holds" in await asyncio.to_thread(process.done, "audit", "--verify")
