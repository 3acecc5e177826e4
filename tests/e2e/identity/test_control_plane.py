"""Devices and gateways against the real control plane; only the devices' time and chance are the test's."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

from causeway_server.cloud_pool.accounts.identity.config import FleetIdentityConfig, IdentityConfig
from causeway_server.edge_node.agent.link.connection import AgentReport
from causeway_server.edge_node.agent.link.control_plane import FleetRefused
from causeway_server.edge_node.agent.link.identity import IDENTITY, JoinRequest, join, leave, open_key, read_identity
from causeway_server.fleet.app import ServeSettings, running
from causeway_server.fleet.server.plane import ControlPlane
from causeway_server.fleet.store.enrolment import new_join_token
from causeway_server.fleet.store.generations import advance, revoke
from causeway_server.router.bundle.protocol import DeviceState, ReportKey
from causeway_server.router.errors import AuthenticationFailed
from tests.fleet.server.conftest import fleet_folder as fleet_folder  # a fixture
from tests.ports import free_port

from .test_device import Device, eventually
from .test_gateways import Gateway

pytestmark = pytest.mark.slow
BUNDLE = "c" * 64


class Server:
    """A control plane that can be stopped and started at its address, and keeps its data."""

    def __init__(self, folder: Path) -> None:
        self._settings = ServeSettings(folder, folder / "keys", folder / "data", port=free_port())
        self.url = f"http://127.0.0.1:{self._settings.port}"
        self.plane: ControlPlane
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._stop.clear()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with running(self._settings) as (self.plane, _):
                started.set_result(None)
                await self._stop.wait()

        self._task = asyncio.create_task(serve())
        await asyncio.wait([started, self._task], return_when=asyncio.FIRST_COMPLETED)
        await started

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    async def join_token(self, uses: int = 1) -> str:
        async with self.plane.store.write() as connection:
            return await new_join_token(
                connection, cohort="", tenant="acme", labels={}, uses=uses, expires_s=600.0, now=time.time()
            )

    async def joined(self, state_dir: Path, name: str = "kiosk-1", token: str = "") -> Device:
        request = JoinRequest(url=self.url, token=token or await self.join_token(), name=name, labels={"role": "kiosk"})
        await join(state_dir, request, time.time())
        return Device(state_dir / "fleet")

    async def revoke(self, device: str = "kiosk-1") -> None:
        async with self.plane.store.write() as connection:
            assert await revoke(connection, device, time.time())
        await self.plane.wakes.refresh()

    async def tell(self, cohort: str = "kiosk") -> None:
        async with self.plane.store.write() as connection:
            await advance(connection, cohort)
        await self.plane.wakes.refresh()

    async def row(self, query: str) -> tuple[object, ...] | None:
        async with self.plane.store.read() as connection:
            found = (await connection.execute(text(query))).first()
        return None if found is None else tuple(found)


@pytest.fixture
async def server(fleet_folder: Path) -> AsyncIterator[Server]:
    server = Server(fleet_folder)
    await server.start()
    yield server
    await server.stop()


async def test_a_join_may_be_repeated_with_the_same_key_only(server: Server, tmp_path: Path) -> None:
    token = await server.join_token()
    device = await server.joined(tmp_path / "device", token=token)
    key = open_key(device.folder).public
    (device.folder / IDENTITY).unlink()  # the answer was lost
    again = await server.joined(tmp_path / "device", token=token)
    assert again.link.identity.device == "kiosk-1"
    assert open_key(again.folder).public == key
    with pytest.raises(FleetRefused, match="join_token_used"):
        await server.joined(tmp_path / "thief", name="kiosk-2", token=token)


async def test_one_token_opens_both_until_the_device_is_revoked(server: Server, tmp_path: Path) -> None:
    """The gateway's copy is at most `refresh_s` old, which is within a minute."""
    device = await server.joined(tmp_path / "device")
    gateway = Gateway(IdentityConfig(fleet=FleetIdentityConfig(url=server.url, tenants=("acme",))))
    await gateway.trust.refresh()
    async with device.running():
        await eventually(lambda: device.link.tokens.token)
        token = device.link.tokens.token
        assert gateway.device(token) == "kiosk-1"
        await server.revoke()
        gateway.now += FleetIdentityConfig().refresh_s
        await gateway.trust.refresh()
        with pytest.raises(AuthenticationFailed, match="revoked"):
            gateway.device(token)
        device.link.changed()
        await eventually(lambda: any("device_revoked" in problem for problem in device.link.problems))
        assert device.link.tokens.token == ""
        device.time.now += 31
        assert not await device.link.tokens.renew(token)
    await gateway.trust.close()


async def test_a_change_wakes_a_parked_device(server: Server, tmp_path: Path) -> None:
    async with (await server.joined(tmp_path / "device")).running() as device:
        await eventually(lambda: device.wakes == 1)
        await device.time.pass_s(2)
        await eventually(lambda: server.plane.wakes.polls.parked == 1)
        await server.tell()
        await eventually(lambda: device.wakes == 2)
        await device.time.pass_s(2)
        await eventually(lambda: server.plane.wakes.polls.parked == 1)
        await server.tell("everyone")
        assert device.wakes == 2


async def test_status_and_telemetry_arrive(server: Server, tmp_path: Path) -> None:
    async with (await server.joined(tmp_path / "device")).running() as device:
        await eventually(lambda: device.link.tokens.token)
        device.report = AgentReport(state=DeviceState.TRIAL, running=BUNDLE, since=device.time.unix)
        device.link.changed()
        device.sums.add(7)
        query = f"select requests, latency_0 from telemetry where device = 'kiosk-1' and bundle = '{BUNDLE}'"
        await _until(server, device, query, (7, 7))
        await _until(server, device, "select state, running from devices", ("trial", BUNDLE))


async def test_a_device_signs_where_its_report_key_is_refused(server: Server, tmp_path: Path) -> None:
    """As after a control plane got a new token key: the report arrives, and the next token brings another key."""
    async with (await server.joined(tmp_path / "device")).running() as device:
        await eventually(lambda: device.link.plane.report_key is not None)
        device.link.plane.report_key = ReportKey(id="1", key="0" * 64)
        device.report = AgentReport(state=DeviceState.TRIAL, running=BUNDLE, since=device.time.unix)
        device.link.changed()
        await _until(server, device, "select state, running from devices", ("trial", BUNDLE))
        await device.time.pass_s(500)
        await eventually(lambda: device.link.plane.report_key is not None)
        device.report = AgentReport(running=BUNDLE, since=device.time.unix)
        device.link.changed()
        await _until(server, device, "select state, running from devices", ("idle", BUNDLE))
        assert device.link.plane.report_key is not None


async def _until(server: Server, device: Device, query: str, row: tuple[object, ...]) -> None:
    """Let time pass until the control plane's database has the row."""
    async with asyncio.timeout(60):
        while await server.row(query) != row:
            await device.time.pass_s(31)
            await asyncio.sleep(0.05)


async def test_a_cut_network_heals_and_counts_once(server: Server, tmp_path: Path) -> None:
    async with (await server.joined(tmp_path / "device")).running() as device:
        await eventually(lambda: device.wakes == 1)
        await device.time.pass_s(2)
        await eventually(lambda: server.plane.wakes.polls.parked == 1)
        await server.stop()
        device.sums.add(5)
        await device.until(lambda: any("cannot be reached" in problem for problem in device.link.problems))
        assert device.link.tokens.token, "the token is still valid"
        await server.start()
        await device.until(lambda: not any("cannot be reached" in problem for problem in device.link.problems))
        await _until(server, device, "select requests from telemetry", (5,))


async def test_a_control_plane_that_is_away_for_long(server: Server, tmp_path: Path) -> None:
    """The token expires and is given up, which is said; the device comes back by itself, with a new one."""
    async with (await server.joined(tmp_path / "device")).running() as device:
        await eventually(lambda: device.link.tokens.token)
        old = device.link.tokens.token
        await server.stop()
        await device.until(lambda: any("cannot be renewed" in problem for problem in device.link.problems))
        assert device.link.tokens.token == ""
        await server.start()
        device.time.unix = time.time()  # the control plane's clock did not go on with the test's
        await device.until(lambda: device.link.tokens.token not in ("", old))


async def test_a_wrong_clock_gets_a_token(server: Server, tmp_path: Path) -> None:
    """40 days ahead, and 4,000 behind."""
    for index, days in enumerate((40, -4000)):
        device = await server.joined(tmp_path / f"device-{index}", name=f"kiosk-{index}")
        device.time.unix += days * 86400.0
        async with device.running():
            await eventually(lambda device=device: device.link.tokens.token)  # type: ignore[misc]
            assert any("clock" in problem for problem in device.link.problems)


async def test_a_cloned_disk_is_seen_by_all(server: Server, tmp_path: Path) -> None:
    device = await server.joined(tmp_path / "device")
    shutil.copytree(tmp_path / "device", tmp_path / "clone")
    clone = Device(tmp_path / "clone" / "fleet")
    async with device.running(), clone.running():
        for each in (device, clone):
            await eventually(lambda each=each: each.link.tokens.token)  # type: ignore[misc]
        for _ in range(2):
            for each in (device, clone):
                await each.link.may_change(BUNDLE)
        assert any("is a clone" in problem for problem in device.link.problems)
        assert any("is a clone" in problem for problem in clone.link.problems)
    leave(tmp_path / "clone")
    mended = await server.joined(tmp_path / "clone", name="kiosk-2")
    assert open_key(mended.folder).public != open_key(device.folder).public


async def test_a_restarted_device_is_no_clone(server: Server, tmp_path: Path) -> None:
    device = await server.joined(tmp_path / "device")
    for _ in range(4):
        one = Device(device.folder)
        async with one.running():
            await one.link.may_change(BUNDLE)
            assert one.link.problems == ()


async def test_a_device_that_changes_its_cohort_follows(server: Server, tmp_path: Path) -> None:
    async with (await server.joined(tmp_path / "device")).running() as device:
        await eventually(lambda: device.link.tokens.token)
        async with server.plane.store.write() as connection:
            await connection.execute(text("update devices set cohort = 'everyone'"))
        await device.link.may_change(BUNDLE)
        assert device.link.identity.cohort == "everyone"
        identity = read_identity(device.folder)
        assert identity is not None
        assert msgspec.structs.replace(identity, cohort="kiosk") != identity
