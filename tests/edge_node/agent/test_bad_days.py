"""Wrong sources, clocks and networks: the box keeps its bundle, reports why, and goes on when they are right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.agent.agent import BUILT_AT
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.router.bundle.manifest import Blob
from causeway_server.router.bundle.protocol import BoxState
from tests.fleet.trust.signed_fleet import NOW, days

from .fleet import Publisher, TestBox, Time

pytestmark = pytest.mark.slow

IDLE = BoxState.IDLE
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
def source(publisher: Publisher, box: TestBox) -> FaultySource:
    box.source = source = FaultySource(publisher, box.time)
    box.start()
    return source


def blob_of(publisher: Publisher) -> Blob:
    return publisher.manifest().policy


async def test_a_download_resumes_where_it_broke(publisher: Publisher, box: TestBox, source: FaultySource) -> None:
    bundle = publisher.release(policy=PADDING + POLICY)
    source.breaks_after = 40_000
    await box.until(IDLE)
    assert box.agent.row.code == "update_unavailable"
    box.start()
    source.breaks_after = None
    source.asked.clear()
    await box.change()
    assert box.agent.running == bundle
    assert 40_000 in source.asked


async def test_a_drip_of_20_bytes_a_second_is_cut_off(publisher: Publisher, box: TestBox, source: FaultySource) -> None:
    publisher.release(policy=PADDING + POLICY)
    source.drip = True
    began = box.time.monotonic
    await box.until(IDLE)
    assert box.agent.row.code == "download_too_slow"
    assert box.time.monotonic - began < 120.0
    source.drip = False
    await box.change()
    assert box.agent.row.code == ""


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
    publisher: Publisher, box: TestBox, source: FaultySource, change: Callable[[bytes], bytes], code: str
) -> None:
    bundle = publisher.release()
    right, source.change = source.change, change
    await box.until(IDLE)
    assert (box.agent.row.code, box.agent.running, box.host.used) == (code, None, [])
    source.change = right
    await box.change()
    assert box.agent.running == bundle


async def test_thirty_days_offline(publisher: Publisher, box: TestBox, source: FaultySource) -> None:
    """It starts and serves without a network, and takes the next bundle when there is one again."""
    first = publisher.release()
    await box.change()
    source.offline = True
    for _ in range(30):
        for _ in range(20):
            wait_s = await box.agent.advance()
            assert wait_s <= 1.5 * box.settings.check_s
        box.time.pass_s(86400.0)
        box.start()
        assert (box.agent.state, box.agent.running) == (IDLE, first)
    await box.until(IDLE)
    assert box.agent.row.code == "update_unavailable"
    source.offline = False
    second = publisher.release()
    await box.change()
    assert (box.agent.running, box.agent.row.code) == (second, "")


async def test_a_clock_40_days_ahead(publisher: Publisher, box: TestBox) -> None:
    """The same as metadata of 40 days ago: nothing new is taken, what runs stays, and a right clock ends it."""
    publisher.sign()
    publisher.now = NOW - days(40)
    bundle = publisher.release()
    await box.until(IDLE)
    assert (box.agent.row.code, box.agent.running) == ("metadata_frozen", None)
    publisher.now = NOW
    publisher.assign(bundle)
    await box.change()
    assert box.agent.running == bundle


async def test_a_clock_4000_days_behind(publisher: Publisher, box: TestBox) -> None:
    """The box takes signed metadata, but none that expired before the newest signed time that it has seen."""
    box.time.unix -= 4000 * 86400.0
    box.start()
    bundle = publisher.release()
    await box.change()
    signed_at = box.agent.row.signed_at
    assert box.agent.running == bundle
    assert BUILT_AT < signed_at <= min(float(publisher.manifest().created), BUILT_AT + box.settings.signed_step_s)
    box.start()
    assert box.agent.row.signed_at == signed_at


async def test_a_freeze_is_seen_by_a_clock_that_stands_in_the_past(publisher: Publisher, box: TestBox) -> None:
    """Right metadata of an earlier day, which has expired since: the box has seen something newer signed."""
    publisher.release()
    row = msgspec.structs.replace(box.agent.row, signed_at=(NOW + days(3)).timestamp())
    box.booted.journal.append(row)
    box.start()
    await box.until(IDLE)
    assert (box.agent.row.code, box.agent.running) == ("metadata_frozen", None)
    publisher.now = NOW + days(2)
    publisher.release()
    await box.change()
    assert box.agent.row.code == ""


async def test_signed_times_move_the_least_time_by_bounded_steps(publisher: Publisher, box: TestBox) -> None:
    """A signer's clock that is years ahead does not cut boxes off."""
    publisher.now = NOW + days(4000)
    publisher.release()
    await box.change()
    assert box.agent.row.signed_at == BUILT_AT + box.settings.signed_step_s


async def test_an_agent_fault_is_no_end(publisher: Publisher, box: TestBox, tmp_path: Path) -> None:
    """A file stands where the store needs a folder: the agent reports it and looks again."""
    (box.folder / "store").write_bytes(b"a file")
    publisher.release()
    await box.until(IDLE)
    assert box.agent.row.code == "disk_full"
    (box.folder / "store").unlink()
    await box.change()
    assert box.agent.row.code == ""
