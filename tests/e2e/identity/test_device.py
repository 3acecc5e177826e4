"""A device's side of the wire against a control plane on real sockets; time and chance are the test's."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from causeway_server.edge_node.agent.link.connection import AgentReport, FleetConnection, read_record
from causeway_server.edge_node.agent.link.control_plane import ControlPlane, FleetRefused, FleetUnreachable
from causeway_server.edge_node.agent.link.identity import (
    DeviceKey,
    JoinRequest,
    join,
    leave,
    new_key,
    open_key,
    read_identity,
)
from causeway_server.edge_node.agent.link.telemetry import MAX_SAMPLES, MAX_WAITING, TELEMETRY_FILE, TelemetryLog
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import CloudServer, Config, FleetConfig
from causeway_server.edge_node.daemon.fleet import connect, credentials
from causeway_server.edge_node.observability.metrics import Traffic
from causeway_server.router.bundle.protocol import MAX_MESSAGE_BYTES, DeviceState, StatusReply
from causeway_server.router.errors import ConfigError

from .scripted_plane import Refusal, ScriptedPlane

pytestmark = pytest.mark.slow

BUNDLE, OTHER = "a" * 64, "b" * 64


class Sums:
    """The daemon's sums of requests."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def read(self) -> Traffic:
        return self.traffic

    def add(self, requests: int) -> None:
        before = self.traffic
        latency = (before.latency[0] + requests, *before.latency[1:])
        self.traffic = Traffic(before.requests + requests, latency=latency)


class Time:
    """A clock and a sleep: each sleeper waits until the test lets so much time pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.unix = time.time()
        self._sleepers: list[tuple[float, anyio.Event]] = []
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        event = anyio.Event()
        self._sleepers.append((self.now + seconds, event))
        await event.wait()

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, sleeper by sleeper."""
        end = self.now + seconds
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
        while due := [one for one in self._sleepers if one[0] <= end]:
            first = min(due, key=lambda one: one[0])
            self._sleepers.remove(first)
            self.unix += max(0.0, first[0] - self.now)
            self.now = max(self.now, first[0])
            first[1].set()
            await asyncio.sleep(0.02)
        self.unix += end - self.now
        self.now = end

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, unix=lambda: self.unix)


class Chance:
    """Takes the middle, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float]] = []

    def __call__(self, low: float, high: float) -> float:
        self.asked.append((low, high))
        return (low + high) / 2


@pytest.fixture
async def plane() -> AsyncIterator[ScriptedPlane]:
    async with ScriptedPlane().running() as plane:
        yield plane


async def joined(plane: ScriptedPlane, state_dir: Path, name: str = "kiosk-1") -> Path:
    await join(state_dir, JoinRequest(url=plane.url, token="cwjoin_x", name=name), time.time())
    return state_dir / "fleet"


class Device:
    def __init__(self, folder: Path) -> None:
        self.time, self.chance, self.sums = Time(), Chance(), Sums()
        identity = read_identity(folder)
        assert identity is not None
        self.folder = folder
        self.link = FleetConnection(
            folder,
            identity,
            open_key(folder),
            clock=self.time.clock(),
            read_traffic=self.sums.read,
            uniform=self.chance,
            sleep=self.time.sleep,
        )
        self.report = AgentReport()
        self.wakes = 0
        self.link.follow(lambda: self.report, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Device]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.link.run)
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()
        await self.link.close()

    async def until(self, condition: Callable[[], object], step_s: float = 31.0) -> None:
        """Let time pass until the condition holds: what the network takes is not the clock's to know."""
        with anyio.fail_after(60):
            while not condition():
                await self.time.pass_s(step_s)
                await anyio.sleep(0.05)


async def eventually(condition: Callable[[], object]) -> None:
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110 -- other tasks have no event for it
            await anyio.sleep(0.01)


# --- enrolment -------------------------------------------------------------------------------------------------------


async def test_the_key_is_made_on_the_device_and_closed_to_others(plane: ScriptedPlane, tmp_path: Path) -> None:
    folder = await joined(plane, tmp_path)
    assert stat.S_IMODE((folder / "device.key").stat().st_mode) == 0o600
    assert plane.keys == {"kiosk-1": open_key(folder).public}
    identity = read_identity(folder)
    assert identity is not None
    assert (identity.device, identity.cohort, identity.root) == ("kiosk-1", "kiosk", "{}")
    assert "PRIVATE" not in (folder / "identity.json").read_text()


async def test_a_key_that_others_may_read_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_key(tmp_path)
    (tmp_path / "device.key").chmod(0o644)
    open_key(tmp_path)
    assert stat.S_IMODE((tmp_path / "device.key").stat().st_mode) == 0o600
    assert "Other users could read" in caplog.text


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    first = new_key(tmp_path)
    with pytest.raises(FileExistsError):
        DeviceKey.create(tmp_path / "device.key")
    assert new_key(tmp_path).public == first.public


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_damaged_key_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "device.key").write_bytes(content)
    with pytest.raises(ConfigError, match="join it again"):
        open_key(tmp_path)


async def test_a_lost_answer_is_asked_for_again_with_the_same_key(plane: ScriptedPlane, tmp_path: Path) -> None:
    plane.lose = {"/v1/enroll"}
    with pytest.raises(FleetUnreachable):
        await joined(plane, tmp_path)
    assert read_identity(tmp_path / "fleet") is None
    before = dict(plane.keys)
    plane.lose = set()
    await joined(plane, tmp_path)
    assert plane.keys == before


@pytest.mark.parametrize("code", ["join_token_used", "join_token_expired", "join_token_unknown"])
async def test_a_refused_enrolment_leaves_no_identity(plane: ScriptedPlane, tmp_path: Path, code: str) -> None:
    plane.refusals = {"/v1/enroll": Refusal(403, code)}
    with pytest.raises(FleetRefused, match=code) as caught:
        await joined(plane, tmp_path)
    assert caught.value.code == code
    assert read_identity(tmp_path / "fleet") is None


async def test_a_device_joins_one_fleet_at_a_time(plane: ScriptedPlane, tmp_path: Path) -> None:
    await joined(plane, tmp_path)
    with pytest.raises(ConfigError, match="Leave that fleet first"):
        await joined(plane, tmp_path)
    key = open_key(tmp_path / "fleet").public
    leave(tmp_path)
    assert not (tmp_path / "fleet").exists()
    await joined(plane, tmp_path)
    assert open_key(tmp_path / "fleet").public != key


@pytest.mark.parametrize("url", ["http://fleet.example", "fleet.example", "ftp://127.0.0.1"])
async def test_a_join_token_is_not_sent_in_the_clear(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="fleet URL"):
        await join(tmp_path, JoinRequest(url=url, token="t"), 0.0)
    assert not (tmp_path / "fleet").exists()


def test_a_device_that_never_joined_has_no_link(tmp_path: Path) -> None:
    assert connect(tmp_path, FleetConfig(), Clock(), Traffic) == (None, "")


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_a_token_is_renewed_before_it_expires(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await eventually(lambda: device.link.tokens.token == "token-1")
        await device.time.pass_s(599)
        await eventually(lambda: device.link.tokens.token == "token-2")
        assert len({request.nonce for request in plane.token_requests}) == len(plane.token_requests)
        sent = [request.sent for request in plane.token_requests]
        assert sent == sorted(set(sent))


async def test_a_refused_token_is_renewed_once_for_all_that_ask(plane: ScriptedPlane, tmp_path: Path) -> None:
    """A token that has just arrived is not renewed: another one would be refused as well."""
    async with Device(await joined(plane, tmp_path)).running() as device:
        await eventually(lambda: device.link.tokens.token)
        assert not await device.link.tokens.renew("token-1")
        device.time.now += 31
        renewed: list[bool] = []

        async def renew() -> None:
            renewed.append(await device.link.tokens.renew("token-1"))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(renew)
        assert renewed == [True] * 5
        assert plane.tokens == ["token-1", "token-2"]


async def test_a_request_does_not_wait_for_a_control_plane_that_hangs(plane: ScriptedPlane, tmp_path: Path) -> None:
    """The first one waits for two seconds, those that follow not at all; the renewal goes on for all of them."""
    async with Device(await joined(plane, tmp_path)).running() as device:
        await eventually(lambda: device.link.tokens.token)
        plane.hang = anyio.Event()
        device.time.now += 31
        assert not await device.link.tokens.renew("token-1")
        device.time.now += 3
        with anyio.move_on_after(0) as at_once:
            assert not await device.link.tokens.renew("token-1")
        assert not at_once.cancelled_caught
        plane.hang.set()
        await eventually(lambda: device.link.tokens.token == "token-2")
        assert await device.link.tokens.renew("token-1")


async def test_a_token_that_cannot_be_renewed_is_said_and_given_up(plane: ScriptedPlane, tmp_path: Path) -> None:
    """And the device comes back by itself."""
    async with Device(await joined(plane, tmp_path)).running() as device:
        plane.unix = lambda: device.time.unix
        await eventually(lambda: device.link.tokens.token)
        plane.refusals = {path: Refusal(503, "") for path in ("/v1/token", "/v1/wake", "/v1/status")}
        plane.news()
        await device.time.pass_s(500)
        assert device.link.tokens.token == "token-1"
        assert not any("cannot be renewed" in problem for problem in device.link.problems)
        await device.until(lambda: any("cannot be renewed" in problem for problem in device.link.problems))
        assert device.link.tokens.token == ""
        plane.refusals = {}
        await device.until(lambda: device.link.tokens.token != "" and not device.link.problems)


async def test_a_revoked_device_says_so_and_gives_up_its_token(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await eventually(lambda: device.link.tokens.token)
        plane.refusals = {path: Refusal(403, "device_revoked") for path in ("/v1/token", "/v1/status")}
        device.link.changed()
        await eventually(lambda: any("device_revoked" in problem for problem in device.link.problems))
        assert device.link.tokens.token == ""
        record = read_record(device.folder)
        assert record is not None
        await device.until(lambda: any("device_revoked" in problem for problem in read_problems(device.folder)))


def read_problems(folder: Path) -> tuple[str, ...]:
    record = read_record(folder)
    return () if record is None else record.problems


GATEWAY = "https://gateway.example/v1"


@pytest.mark.parametrize(
    ("clouds", "sent"),
    [
        ([CloudServer(GATEWAY)], [True]),
        ([CloudServer("http://127.0.0.1:8090/v1")], [True]),
        ([CloudServer("http://gateway.example/v1")], [False]),
        ([CloudServer("https://vendor.example/v1", key="sk-vendor")], [False]),
        ([CloudServer(GATEWAY, fleet_token=False)], [False]),
        ([CloudServer(GATEWAY), CloudServer("https://vendor.example/v1")], [False, False]),
        ([CloudServer(GATEWAY, fleet_token=True), CloudServer("https://vendor.example/v1")], [True, False]),
        (
            [CloudServer(GATEWAY, fleet_token=True), CloudServer("http://gateway.example/v1", fleet_token=True)],
            [True, False],
        ),
    ],
)
async def test_the_fleets_token_is_sent_only_where_it_is_meant_to_and_cannot_be_read(
    plane: ScriptedPlane, tmp_path: Path, clouds: list[CloudServer], sent: list[bool]
) -> None:
    """A vendor that is added to the fleet's gateway gets nothing of the fleet's."""
    device = Device(await joined(plane, tmp_path))
    configs = Config(clouds={f"c{at}": cloud for at, cloud in enumerate(clouds)}).cloud_configs
    assert [credentials(device.link, config) is device.link.tokens for config in configs] == sent


async def test_a_wrong_clock_does_not_lock_the_device_out(plane: ScriptedPlane, tmp_path: Path) -> None:
    """40 days ahead: the control plane's time is used, and the difference is said."""
    plane.check_time = True
    device = Device(await joined(plane, tmp_path))
    device.time.unix = time.time() + 40 * 86400
    async with device.running():
        await eventually(lambda: device.link.tokens.token)
        assert any("clock" in problem for problem in device.link.problems)


# --- wakes -----------------------------------------------------------------------------------------------------------


async def test_a_change_wakes_the_agent(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await plane.until(lambda: len(plane.polls) >= 1)
        await eventually(lambda: device.wakes == 1)
        await device.time.pass_s(2)
        await plane.until(lambda: len(plane.polls) >= 2)
        assert plane.polls[1] == ('"1"', 225.0)
        plane.news()
        await eventually(lambda: device.wakes == 2)
        assert (150.0, 300.0) in device.chance.asked


async def test_after_a_lost_connection_a_device_waits_up_to_a_minute(plane: ScriptedPlane, tmp_path: Path) -> None:
    """One lost poll is no problem; two are, until the control plane answers again."""
    async with Device(await joined(plane, tmp_path)).running() as device:
        await eventually(lambda: device.wakes == 1)
        plane.refusals = {"/v1/wake": Refusal(503, "")}
        await device.time.pass_s(2)
        await eventually(lambda: (0.0, 60.0) in device.chance.asked)
        assert device.link.problems == ()
        await device.time.pass_s(31)
        await eventually(lambda: device.link.problems)
        plane.refusals = {}
        await device.time.pass_s(31)
        await eventually(lambda: not device.link.problems)


async def test_a_control_plane_that_never_waits_is_not_asked_in_a_loop(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await plane.until(lambda: len(plane.polls) >= 1)
        plane.generation = 0
        await device.time.pass_s(2)
        for _ in range(20):
            plane.news()
            await anyio.sleep(0.01)
        assert len(plane.polls) <= 4


# --- status and telemetry --------------------------------------------------------------------------------------------


async def test_each_change_is_reported_in_order(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await plane.until(lambda: len(plane.reports) >= 1)
        for state in (DeviceState.FETCH, DeviceState.TRIAL):
            device.report = AgentReport(state=state, running=BUNDLE, wanted=OTHER, since=5.0)
            device.link.changed()
            await plane.until(partial(_newest_is, plane, state))
        assert [report.seq for report in plane.reports] == list(range(1, len(plane.reports) + 1))
        assert {report.boot for report in plane.reports} == {device.link.boot}
        assert (plane.reports[-1].running, plane.reports[-1].wanted) == (BUNDLE, OTHER)


def _newest_is(plane: ScriptedPlane, state: DeviceState) -> bool:
    return plane.reports[-1].state is state


async def test_two_runs_of_a_daemon_have_two_boots(plane: ScriptedPlane, tmp_path: Path) -> None:
    folder = await joined(plane, tmp_path)
    assert Device(folder).link.boot != Device(folder).link.boot


async def test_the_reply_says_whether_the_device_may_change(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        assert await device.link.may_change(BUNDLE) == 0.0
        assert plane.reports[-1].wanted == BUNDLE
        plane.reply = StatusReply(may_change=False, now=0.0, cohort="kiosk", retry_after_s=77.0)
        assert await device.link.may_change(BUNDLE) == 77.0
        plane.refusals = {"/v1/status": Refusal(500, "")}
        assert await device.link.may_change(BUNDLE) == 30.0


async def test_what_was_imported_needs_no_control_plane(plane: ScriptedPlane, tmp_path: Path) -> None:
    """The agent is woken for it within a minute, may change to it, and it is removed when the device runs it."""
    async with Device(await joined(plane, tmp_path)).running() as device:
        await eventually(lambda: device.wakes == 1)
        (device.folder / "import").mkdir()
        (device.folder / "import" / "wanted").write_text(BUNDLE)
        await device.time.pass_s(70)
        await eventually(lambda: device.wakes == 2)
        plane.refusals = {"/v1/status": Refusal(503, "")}
        assert await device.link.may_change(BUNDLE) == 0.0
        assert await device.link.may_change(OTHER) > 0.0
        device.report = AgentReport(running=OTHER, wanted=BUNDLE)
        await device.link.check_import()
        assert device.link.source.stamp
        device.report = AgentReport(running=BUNDLE)
        await device.link.check_import()
        assert not device.link.source.stamp


async def test_a_clone_is_said(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        plane.reply = StatusReply(may_change=True, now=0.0, cohort="kiosk", cloned=True)
        device.link.changed()
        await eventually(lambda: any("is a clone" in problem for problem in device.link.problems))
        record = read_record(device.folder)
        assert record is not None
        assert record.cloned


async def test_a_new_cohort_is_kept_over_a_restart(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        plane.reply = StatusReply(may_change=True, now=0.0, cohort="till")
        device.link.changed()
        await eventually(lambda: device.link.identity.cohort == "till")
        identity = read_identity(device.folder)
        assert identity is not None
        assert identity.cohort == "till"


async def test_telemetry_is_counted_by_bundle(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await plane.until(lambda: len(plane.reports) >= 1)
        device.sums.add(3)
        device.report = AgentReport(running=BUNDLE)
        device.link.changed()
        device.sums.add(2)
        await device.time.pass_s(61)
        await plane.until(lambda: len(plane.telemetry) >= 1)
        samples = plane.telemetry[0].samples
        assert [(sample.bundle, sample.requests, sample.latency[0]) for sample in samples] == [
            (None, 3, 3),
            (BUNDLE, 2, 2),
        ]


async def test_a_lost_answer_repeats_the_same_message(plane: ScriptedPlane, tmp_path: Path) -> None:
    async with Device(await joined(plane, tmp_path)).running() as device:
        await plane.until(lambda: len(plane.reports) >= 1)
        plane.lose = {"/v1/telemetry"}
        device.sums.add(3)
        await device.time.pass_s(61)
        await plane.until(lambda: len(plane.telemetry) >= 1)
        plane.lose = set()
        device.sums.add(4)
        await device.until(lambda: len(plane.telemetry) >= 3)
        assert plane.telemetry[0] == plane.telemetry[1]
        assert [message.seq for message in plane.telemetry] == [1, 1, 2]
        assert plane.telemetry[2].samples[0].requests == 4


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
@pytest.mark.parametrize("counted", [False, True], ids=["never arrived", "answer lost"])
async def test_telemetry_of_an_earlier_run_is_sent_and_counted_once(
    plane: ScriptedPlane, tmp_path: Path, killed: bool, counted: bool
) -> None:
    """With the boot id and number of its first try; it may have arrived then."""
    folder = await joined(plane, tmp_path)
    first = Device(folder)
    first.sums.add(5)
    if counted:
        plane.lose = {"/v1/telemetry"}
    else:
        plane.refusals = {"/v1/telemetry": Refusal(503, "")}
    async with first.running():
        await first.until((folder / TELEMETRY_FILE).exists)
        kept = (folder / TELEMETRY_FILE).read_bytes()
    if killed:
        (folder / TELEMETRY_FILE).write_bytes(kept)  # what a run that did not end by itself leaves
    plane.lose, plane.refusals = set(), {}
    arrived = len(plane.telemetry)
    second = Device(folder)
    second.sums.add(7)
    async with second.running():
        await second.until(lambda: len(plane.telemetry) >= arrived + 2)
    old, new = plane.telemetry[arrived : arrived + 2]
    assert (old.boot, old.seq, old.samples[0].requests) == (first.link.boot, 1, 5)
    assert (new.boot, new.seq, new.samples[0].requests) == (second.link.boot, 1, 7)
    assert all(message == old for message in plane.telemetry[:arrived])
    assert not (folder / TELEMETRY_FILE).exists()


@pytest.mark.parametrize("content", [b"", b"[{", b'{"device":1}', b"\xff"])
def test_a_damaged_telemetry_file_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TELEMETRY_FILE).write_bytes(content)
    assert TelemetryLog("kiosk-1", "boot", Sums().read, Clock(), tmp_path).next() is None


def test_what_waits_is_bounded_and_its_loss_counted(tmp_path: Path) -> None:
    now, sums = Time(), Sums()
    log = TelemetryLog("kiosk-1", "boot", sums.read, Clock(lambda: now.now, lambda: now.unix), tmp_path)
    for _ in range(MAX_WAITING + 10):
        sums.add(1)
        now.unix += 60
        log.cut(BUNDLE)
    assert (len(log), log.lost) == (MAX_WAITING, 10)
    message = log.next()
    assert message is not None
    assert len(message.samples) == MAX_SAMPLES
    assert len(msgspec.json.encode(message)) < MAX_MESSAGE_BYTES
    received = 0
    while message := log.next():
        received += sum(sample.requests for sample in message.samples)
        log.accepted(message)
    assert received == MAX_WAITING


def test_a_clock_that_steps_back_makes_no_backward_sample(tmp_path: Path) -> None:
    now, sums = Time(), Sums()
    log = TelemetryLog("kiosk-1", "boot", sums.read, Clock(lambda: now.now, lambda: now.unix), tmp_path)
    sums.add(1)
    now.unix -= 3600
    log.cut(None)
    message = log.next()
    assert message is not None
    assert message.samples[0].began <= message.samples[0].ended


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 70_000, 100_000])
async def test_a_file_is_fetched_from_an_offset(plane: ScriptedPlane, ranges: bool, offset: int) -> None:
    content = os.urandom(100_000)
    plane.files["blobs/x"], plane.ranges = content, ranges
    source = ControlPlane(plane.url)
    fetched = b"".join([chunk async for chunk in source.fetch("blobs/x", offset)])
    await source.close()
    assert fetched == content[offset:]


async def test_a_file_that_is_not_there_is_another_error_than_a_source_that_is_away(plane: ScriptedPlane) -> None:
    source = ControlPlane(plane.url)
    with pytest.raises(FileNotFoundError):
        await anext(source.fetch("blobs/none"))
    plane.refusals = {"/blobs/x": Refusal(500, "")}
    with pytest.raises(OSError, match="500") as caught:
        await anext(source.fetch("blobs/x"))
    assert not isinstance(caught.value, FileNotFoundError)
    await source.close()
    away = ControlPlane("http://127.0.0.1:1")
    with pytest.raises(OSError, match="refused"):
        await anext(away.fetch("blobs/x"))
    await away.close()


async def test_a_fetch_that_is_left_closes_its_connection(plane: ScriptedPlane) -> None:
    plane.files["blobs/x"] = bytes(5_000_000)
    source = ControlPlane(plane.url)
    async with aclosing(source.fetch("blobs/x")) as chunks:
        assert await anext(chunks)
    await source.close()
