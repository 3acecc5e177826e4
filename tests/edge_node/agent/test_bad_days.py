"""Wrong sources, clocks and networks: the device keeps its bundle, reports why, and goes on when they are right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.agent.agent import BUILT_AT
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.router.bundle.manifest import Blob
from causeway_server.router.bundle.protocol import DeviceState
from tests.fleet.trust.signed_fleet import NOW, days

from .fleet import Publisher, TestDevice, Time

pytestmark = pytest.mark.slow

IDLE = DeviceState.IDLE
PADDING = "# " + "x" * 100_000 + "\n"
POLICY = """\
version: 1
name: large
targets:
  small: {at: edge, model: m-small}
routes:
  - {name: device, use: [small]}
"""


class FaultySource(FolderSource):
    """A folder behind a network with faults; `asked` are the blobs and where their fetch began."""

    def __init__(self, publisher: Publisher, time: Time) -> None:
        super().__init__(publisher.folder)
        self._time = time
        self.asked: list[int] = []
        self.offline = False
        self.change: Callable[[bytes], bytes] = lambda chunk: chunk
        self.drip = False
        self.breaks_after: int | None = None

    async def fetch(self, path: str, offset: int = 0) -> AsyncIterator[bytes]:
        if self.offline:
            raise OSError("no route to host")
        if not path.startswith("blobs/"):
            async for chunk in super().fetch(path, offset):
                yield chunk
            return
        self.asked.append(offset)
        async for chunk in super().fetch(path, offset):
            async for part in self._sent(self.change(chunk)):
                yield part

    async def _sent(self, chunk: bytes) -> AsyncIterator[bytes]:
        if self.drip:
            for at in range(0, len(chunk), 20):
                self._time.pass_s(1.0)
                yield chunk[at : at + 20]
        elif self.breaks_after is not None:
            yield chunk[: self.breaks_after]
            raise ConnectionResetError("the connection broke")
        else:
            yield chunk


@pytest.fixture
def source(publisher: Publisher, device: TestDevice) -> FaultySource:
    device.source = source = FaultySource(publisher, device.time)
    device.start()
    return source


def blob_of(publisher: Publisher) -> Blob:
    return publisher.manifest().policy


async def test_a_download_resumes_where_it_broke(
    publisher: Publisher, device: TestDevice, source: FaultySource
) -> None:
    bundle = publisher.release(policy=PADDING + POLICY)
    source.breaks_after = 40_000
    await device.until(IDLE)
    assert device.agent.row.code == "update_unavailable"
    device.start()
    source.breaks_after = None
    source.asked.clear()
    await device.change()
    assert device.agent.running == bundle
    assert 40_000 in source.asked


async def test_a_drip_of_20_bytes_a_second_is_cut_off(
    publisher: Publisher, device: TestDevice, source: FaultySource
) -> None:
    publisher.release(policy=PADDING + POLICY)
    source.drip = True
    began = device.time.monotonic
    await device.until(IDLE)
    assert device.agent.row.code == "download_too_slow"
    assert device.time.monotonic - began < 120.0
    source.drip = False
    await device.change()
    assert device.agent.row.code == ""


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda chunk: chunk[:-1] + b"!", "bundle_altered"),
        (lambda chunk: chunk * 2, "endless_data"),
        (lambda chunk: chunk[:-1], "update_unavailable"),
        (lambda _: b"", "update_unavailable"),
    ],
    ids=["altered", "endless", "short", "empty"],
)
async def test_wrong_content_is_refused_and_fetched_again(
    publisher: Publisher, device: TestDevice, source: FaultySource, change: Callable[[bytes], bytes], code: str
) -> None:
    bundle = publisher.release()
    right, source.change = source.change, change
    await device.until(IDLE)
    assert (device.agent.row.code, device.agent.running, device.host.used) == (code, None, [])
    source.change = right
    await device.change()
    assert device.agent.running == bundle


async def test_thirty_days_offline(publisher: Publisher, device: TestDevice, source: FaultySource) -> None:
    """It starts and serves without a network, and takes the next bundle when there is one again."""
    first = publisher.release()
    await device.change()
    source.offline = True
    for _ in range(30):
        for _ in range(20):
            wait_s = await device.agent.advance()
            assert wait_s <= 1.5 * device.settings.check_interval_s
        device.time.pass_s(86400.0)
        device.start()
        assert (device.agent.state, device.agent.running) == (IDLE, first)
    await device.until(IDLE)
    assert device.agent.row.code == "update_unavailable"
    source.offline = False
    second = publisher.release()
    await device.change()
    assert (device.agent.running, device.agent.row.code) == (second, "")


async def test_a_clock_40_days_ahead(publisher: Publisher, device: TestDevice) -> None:
    """The same as metadata of 40 days ago: nothing new is taken, what runs stays, and a right clock ends it."""
    publisher.sign()
    publisher.now = NOW - days(40)
    bundle = publisher.release()
    await device.until(IDLE)
    assert (device.agent.row.code, device.agent.running) == ("metadata_frozen", None)
    publisher.now = NOW
    publisher.assign(bundle)
    await device.change()
    assert device.agent.running == bundle


async def test_a_clock_4000_days_behind(publisher: Publisher, device: TestDevice) -> None:
    """The device takes signed metadata, but none that expired before the newest signed time that it has seen."""
    device.time.unix -= 4000 * 86400.0
    device.start()
    bundle = publisher.release()
    await device.change()
    signed_at = device.agent.row.signed_at
    assert device.agent.running == bundle
    assert BUILT_AT < signed_at <= min(float(publisher.manifest().created), BUILT_AT + device.settings.signed_step_s)
    device.start()
    assert device.agent.row.signed_at == signed_at


async def test_a_freeze_is_seen_by_a_clock_that_stands_in_the_past(publisher: Publisher, device: TestDevice) -> None:
    """Right metadata of an earlier day, which has expired since: the device has seen something newer signed."""
    publisher.release()
    row = msgspec.structs.replace(device.agent.row, signed_at=(NOW + days(3)).timestamp())
    device.booted.journal.append(row)
    device.start()
    await device.until(IDLE)
    assert (device.agent.row.code, device.agent.running) == ("metadata_frozen", None)
    publisher.now = NOW + days(2)
    publisher.release()
    await device.change()
    assert device.agent.row.code == ""


async def test_signed_times_move_the_least_time_by_bounded_steps(publisher: Publisher, device: TestDevice) -> None:
    """A signer's clock that is years ahead does not cut devices off."""
    publisher.now = NOW + days(4000)
    publisher.release()
    await device.change()
    assert device.agent.row.signed_at == BUILT_AT + device.settings.signed_step_s


async def test_an_agent_fault_is_no_end(publisher: Publisher, device: TestDevice, tmp_path: Path) -> None:
    """A file stands where the store needs a folder: the agent reports it and looks again."""
    (device.folder / "store").write_bytes(b"a file")
    publisher.release()
    await device.until(IDLE)
    assert device.agent.row.code == "disk_full"
    (device.folder / "store").unlink()
    await device.change()
    assert device.agent.row.code == ""
