"""The response cache: bounds, ages, privacy, and disk faults."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.storage.background_sqlite import Write
from causeway_server.edge_node.storage.cache import FILE, AnswerCache, StoredAnswer
from causeway_server.router.openai.answer import CachedAnswer
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.types import Chunk, Embeddings, Message, Request, Usage
from tests.waiting import until

pytestmark = pytest.mark.slow

REQUEST = Request(kind="chat", model="auto", messages=(Message("user", "hi"),))


class ManualClock:
    """A clock that a test sets."""

    def __init__(self, boot_id: str = "boot 1") -> None:
        self.monotonic_s = 100.0
        self.unix_s = 1_000_000.0
        self.boot_id = boot_id

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic_s, lambda: self.unix_s, self.boot_id)


def answer(text: str = "hello") -> StoredAnswer:
    chunks = [Chunk(text=text, tokens=1), Chunk(finish_reason="stop"), Chunk(usage=Usage(3, 1))]
    return StoredAnswer("large", "m", CachedAnswer(REQUEST, "m", chunks))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@asynccontextmanager
async def opened(
    directory: Path | None, manual: ManualClock, *, memory: int = 1 << 20, disk: int = 1 << 20, retry_s: float = 0.0
) -> AsyncIterator[AnswerCache]:
    keys = None if directory is None else StateKeys(directory)
    with suppress(OSError):
        if keys is not None:
            keys.prepare()  # a look-up waits only a moment for a new folder
    cache = AnswerCache(
        memory_bytes=memory, disk_bytes=disk, directory=directory, clock=manual.clock, retry_s=retry_s, keys=keys
    )
    cache.start()
    try:
        yield cache
    finally:
        cache.close()


def stored(directory: Path) -> int:
    with suppress(sqlite3.Error), closing(sqlite3.connect(directory / FILE)) as database:
        return int(database.execute("SELECT COUNT(*) FROM answers").fetchone()[0])
    return 0


async def test_a_stored_answer_is_found_with_its_age(tmp_path: Path) -> None:
    """A hit has the same bytes as the answer except its id and time."""
    manual = ManualClock()
    async with opened(tmp_path, manual) as cache:
        cache.put(key(1), answer())
        manual.monotonic_s += 7.0
        found = cache.lookup_memory(key(1))
        assert found is not None
        assert found.age_s == 7.0
        assert isinstance(found.answer.body, CachedAnswer)
        assert b'"content":"hello"' in found.answer.body.whole("chatcmpl-1", 5)
        assert cache.lookup_memory(key(2)) is None


async def test_in_memory_the_wall_clock_does_not_matter(tmp_path: Path) -> None:
    manual = ManualClock()
    async with opened(tmp_path, manual) as cache:
        cache.put(key(1), answer())
        manual.monotonic_s += 1.0
        for jump in (-900_000.0, 5_000_000.0):
            manual.unix_s += jump
            found = cache.lookup_memory(key(1))
            assert found is not None
            assert found.age_s == 1.0


async def test_an_answer_survives_a_restart_with_its_age(tmp_path: Path) -> None:
    """In the same boot the age continues, even if the wall clock was set in between."""
    manual = ManualClock()
    async with opened(tmp_path, manual) as cache:
        cache.put(key(1), answer())
    manual.monotonic_s += 20.0
    manual.unix_s -= 500_000.0
    async with opened(tmp_path, manual) as cache:
        assert cache.lookup_memory(key(1)) is None
        found = await cache.lookup_disk(key(1), REQUEST)
        assert found is not None
        assert found.age_s == pytest.approx(20.0)
        assert isinstance(found.answer.body, CachedAnswer)
        assert b"hello" in found.answer.body.whole("x", 1)
        assert cache.lookup_memory(key(1)) is not None, "a hit on disk is kept in memory"


@pytest.mark.parametrize(("jump", "age"), [(3600.0, 3600.0), (-3600.0, None)], ids=["ahead", "back"])
async def test_after_a_reboot_the_age_comes_from_the_wall_clock(tmp_path: Path, jump: float, age: float | None) -> None:
    """An entry from the future has no age and is not used."""
    async with opened(tmp_path, ManualClock("boot 1")) as cache:
        cache.put(key(1), answer())
    manual = ManualClock("boot 2")
    manual.monotonic_s = 3.0
    manual.unix_s += jump
    async with opened(tmp_path, manual) as cache:
        found = await cache.lookup_disk(key(1), REQUEST)
        assert (found and found.age_s) == age


async def test_an_answer_that_is_stored_during_the_look_up_on_disk_is_found(tmp_path: Path) -> None:
    """An identical request has ended meanwhile: there is no generation left to join."""
    async with opened(tmp_path, ManualClock()) as cache:
        look_up = asyncio.ensure_future(cache.lookup_disk(key(1), REQUEST))
        await asyncio.sleep(0)  # it waits for the disk now
        assert not look_up.done()
        cache.put(key(1), answer(), durable=False)
        assert await look_up is not None


async def test_private_answers_never_reach_the_disk(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as cache:
        cache.put(key(1), answer("a secret of mine"), durable=False)
        assert cache.lookup_memory(key(1)) is not None
    assert stored(tmp_path) == 0
    assert b"a secret of mine" not in every_byte(tmp_path)


async def test_memory_is_bounded_and_the_least_recently_used_entry_is_evicted() -> None:
    """The bound counts bytes, not entries."""
    manual = ManualClock()
    async with opened(None, manual, memory=64 * 1024) as cache:
        cache.put(key(0), answer("first"))
        for number in range(1, 400):
            cache.put(key(number), answer("x" * 100))
            assert cache.lookup_memory(key(0)) is not None
            assert cache.memory_bytes <= 64 * 1024
        assert cache.lookup_memory(key(1)) is None
        assert cache.lookup_memory(key(399)) is not None


async def test_an_answer_too_large_for_the_memory_is_not_stored() -> None:
    """It would evict all other entries."""
    async with opened(None, ManualClock(), memory=64 * 1024) as cache:
        cache.put(key(1), answer("small"))
        cache.put(key(2), answer("x" * 60_000))
        assert cache.lookup_memory(key(2)) is None
        assert cache.lookup_memory(key(1)) is not None


async def test_the_disk_is_bounded(tmp_path: Path) -> None:
    """The newest answers stay."""
    limit, manual = 256 * 1024, ManualClock()
    async with opened(tmp_path, manual, disk=limit) as cache:
        for number in range(600):
            manual.unix_s += 1.0
            cache.put(key(number), answer("y" * 2000))
    assert (tmp_path / FILE).stat().st_size <= limit + 1024 * 1024
    async with opened(tmp_path, ManualClock(), disk=limit) as cache:
        assert await cache.lookup_disk(key(599), REQUEST) is not None


async def test_embeddings_survive_a_restart_exactly(tmp_path: Path) -> None:
    vectors = Embeddings(((0.5, -0.25), (1.0, 2.0)), Usage(prompt_tokens=4))
    async with opened(tmp_path, ManualClock()) as cache:
        cache.put(key(1), StoredAnswer("small", "m", vectors))
    async with opened(tmp_path, ManualClock()) as cache:
        found = await cache.lookup_disk(key(1), msgspec.structs.replace(REQUEST, kind="embedding"))
        assert found is not None
        assert found.answer.body == vectors


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 1000)


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("spoil", [_garbage, _folder])
async def test_a_corrupt_file_is_set_aside_and_replaced(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / FILE)
    async with opened(tmp_path, ManualClock(), retry_s=60.0) as cache:
        cache.put(key(1), answer())
        await until(lambda: stored(tmp_path) == 1)
        disk = cache.disk()
        assert disk is not None
        assert (disk.corrupt_files, disk.lost_writes, disk.available) == (1, 0, True)
    assert (tmp_path / f"{FILE}.bad").exists()


async def test_a_file_that_is_corrupted_while_in_use_is_replaced(tmp_path: Path) -> None:
    """Answers on disk are lost; answers in memory and requests are not."""
    async with opened(tmp_path, ManualClock()) as cache:
        for number in range(50):
            cache.put(key(number), answer("z" * 3000))
        await until(lambda: stored(tmp_path) == 50)
    data = bytearray((tmp_path / FILE).read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    (tmp_path / FILE).write_bytes(bytes(data))
    async with opened(tmp_path, ManualClock()) as cache:
        assert await cache.lookup_disk(key(7), REQUEST) is None
        cache.put(key(7), answer())
        await until(lambda: stored(tmp_path) == 1)
        disk = cache.disk()
        assert disk is not None
        assert disk.corrupt_files == 1


async def test_with_a_full_disk_writes_are_counted_as_lost_and_later_resume(tmp_path: Path) -> None:
    """Answers stay in memory meanwhile."""
    async with opened(tmp_path, ManualClock()) as cache:
        cache.put(key(1), answer())
        await until(lambda: stored(tmp_path) == 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))  # SQLite reports it as a full disk
        try:
            for number in range(2, 40):
                cache.put(key(number), answer("w" * 4000))
            await until(lambda: lost(cache) > 0)
            assert cache.lookup_memory(key(39)) is not None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        before = stored(tmp_path)
        cache.put(key(99), answer())
        await until(lambda: stored(tmp_path) > before)


async def test_without_a_usable_disk_the_memory_still_works(tmp_path: Path) -> None:
    """The state folder is a file: no error, and the lost writes are counted."""
    (tmp_path / "state").write_text("not a folder")
    async with opened(tmp_path / "state", ManualClock(), retry_s=60.0) as cache:
        cache.put(key(1), answer())
        assert cache.lookup_memory(key(1)) is not None
        assert await cache.lookup_disk(key(2), REQUEST) is None
        await until(lambda: lost(cache) == 1)


async def test_an_entry_that_cannot_be_decoded_is_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path, ManualClock()) as cache:
        cache.put(key(1), answer())
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as database:
        database.execute("UPDATE answers SET value = x'01020304'")
    async with opened(tmp_path, ManualClock()) as cache:
        assert await cache.lookup_disk(key(1), REQUEST) is None


def every_byte(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


async def test_a_stuck_disk_costs_one_short_wait(tmp_path: Path) -> None:
    """After a timeout the disk is not read for some seconds."""
    manual, stuck = ManualClock(), threading.Event()
    async with opened(tmp_path, manual) as cache:
        cache.put(key(1), answer())
        await until(lambda: stored(tmp_path) == 1)
        database = cache.database
        assert database is not None
        database.write(Write("SELECT ?", lambda: (float(stuck.wait(60.0)),)))
        await until(lambda: database.stats().queued_writes == 0)
        assert await cache.lookup_disk(key(1), REQUEST) is None
        stuck.set()
        await until(lambda: database.stats().queued_reads == 0)
        assert await cache.lookup_disk(key(1), REQUEST) is None, "not yet: it was slow a moment ago"
        manual.monotonic_s += 10.0
        found = await cache.lookup_disk(key(1), REQUEST)
        assert found is not None
        assert found.age_s == pytest.approx(10.0)


def lost(cache: AnswerCache) -> int:
    disk = cache.disk()
    return 0 if disk is None else disk.lost_writes
