"""The exact cache: bounded, honest about age, and never in the way when the disk is bad."""

from __future__ import annotations

import resource
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import msgspec
import pytest

from edge_node.clock import Clock
from edge_node.storage.background_sqlite import Write
from edge_node.storage.cache import FILE, AnswerCache, StoredAnswer
from router.openai import CachedAnswer
from router.types import Chunk, Embeddings, Message, Request, Usage

from .scripted import until

REQUEST = Request(kind="chat", model="auto", messages=(Message("user", "hi"),))


class Hands:
    """A clock that a test turns by hand."""

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
    directory: Path | None, hands: Hands, *, memory: int = 1 << 20, disk: int = 1 << 20, retry_s: float = 0.0
) -> AsyncIterator[AnswerCache]:
    cache = AnswerCache(memory_bytes=memory, disk_bytes=disk, directory=directory, clock=hands.clock, retry_s=retry_s)
    cache.start()
    try:
        yield cache
    finally:
        cache.close()


def stored(directory: Path) -> int:
    with suppress(sqlite3.Error), closing(sqlite3.connect(directory / FILE)) as database:
        return int(database.execute("SELECT COUNT(*) FROM answers").fetchone()[0])
    return 0


async def test_what_was_put_is_found_with_its_age(tmp_path: Path) -> None:
    """A hit has the same bytes as the answer, but for its id and time."""
    hands = Hands()
    async with opened(tmp_path, hands) as cache:
        cache.put(key(1), answer())
        hands.monotonic_s += 7.0
        found = cache.lookup_memory(key(1))
        assert found is not None
        assert found.age_s == 7.0
        assert isinstance(found.answer.body, CachedAnswer)
        assert b'"content":"hello"' in found.answer.body.whole("chatcmpl-1", 5)
        assert cache.lookup_memory(key(2)) is None


async def test_the_wall_clock_has_no_say_in_memory(tmp_path: Path) -> None:
    """A wall clock that is set back or ahead changes no age."""
    hands = Hands()
    async with opened(tmp_path, hands) as cache:
        cache.put(key(1), answer())
        hands.monotonic_s += 1.0
        for jump in (-900_000.0, 5_000_000.0):
            hands.unix_s += jump
            found = cache.lookup_memory(key(1))
            assert found is not None
            assert found.age_s == 1.0


async def test_an_answer_survives_a_restart_with_its_age(tmp_path: Path) -> None:
    """After a restart in the same boot the age goes on, even if the wall clock was set in between."""
    hands = Hands()
    async with opened(tmp_path, hands) as cache:
        cache.put(key(1), answer())
    hands.monotonic_s += 20.0
    hands.unix_s -= 500_000.0
    async with opened(tmp_path, hands) as cache:
        assert cache.lookup_memory(key(1)) is None
        found = await cache.lookup_disk(key(1), REQUEST)
        assert found is not None
        assert found.age_s == pytest.approx(20.0)
        assert isinstance(found.answer.body, CachedAnswer)
        assert b"hello" in found.answer.body.whole("x", 1)
        assert cache.lookup_memory(key(1)) is not None, "it is in memory from now on"


@pytest.mark.parametrize(("jump", "age"), [(3600.0, 3600.0), (-3600.0, None)], ids=["ahead", "back"])
async def test_after_a_reboot_the_wall_clock_is_all_there_is(tmp_path: Path, jump: float, age: float | None) -> None:
    """An entry from another boot has the wall clock's age; one from the future has none and is not used."""
    async with opened(tmp_path, Hands("boot 1")) as cache:
        cache.put(key(1), answer())
    hands = Hands("boot 2")
    hands.monotonic_s = 3.0
    hands.unix_s += jump
    async with opened(tmp_path, hands) as cache:
        found = await cache.lookup_disk(key(1), REQUEST)
        assert (found and found.age_s) == age


async def test_private_answers_never_reach_the_disk(tmp_path: Path) -> None:
    """What may not be kept beyond memory is gone with the process, and in no file."""
    async with opened(tmp_path, Hands()) as cache:
        cache.put(key(1), answer("a secret of mine"), durable=False)
        assert cache.lookup_memory(key(1)) is not None
    assert stored(tmp_path) == 0
    assert b"a secret of mine" not in every_byte(tmp_path)


async def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    """Bytes, not entries, are the bound; what was asked for last stays."""
    hands = Hands()
    async with opened(None, hands, memory=64 * 1024) as cache:
        cache.put(key(0), answer("first"))
        for number in range(1, 400):
            cache.put(key(number), answer("x" * 100))
            assert cache.lookup_memory(key(0)) is not None
            assert cache.stats().memory_bytes <= 64 * 1024
        assert cache.lookup_memory(key(1)) is None
        assert cache.lookup_memory(key(399)) is not None


async def test_an_answer_too_large_for_the_memory_is_not_kept() -> None:
    """One giant does not push out everybody else."""
    async with opened(None, Hands(), memory=64 * 1024) as cache:
        cache.put(key(1), answer("small"))
        cache.put(key(2), answer("x" * 60_000))
        assert cache.lookup_memory(key(2)) is None
        assert cache.lookup_memory(key(1)) is not None


async def test_the_disk_is_bounded(tmp_path: Path) -> None:
    """The file's pages stay within the bound, and the newest answers are there."""
    limit, hands = 256 * 1024, Hands()
    async with opened(tmp_path, hands, disk=limit) as cache:
        for number in range(600):
            hands.unix_s += 1.0
            cache.put(key(number), answer("y" * 2000))
    assert (tmp_path / FILE).stat().st_size <= limit + 1024 * 1024
    async with opened(tmp_path, Hands(), disk=limit) as cache:
        assert await cache.lookup_disk(key(599), REQUEST) is not None


async def test_embeddings_are_kept_too(tmp_path: Path) -> None:
    """Vectors survive a restart exactly."""
    vectors = Embeddings(((0.5, -0.25), (1.0, 2.0)), Usage(prompt_tokens=4))
    async with opened(tmp_path, Hands()) as cache:
        cache.put(key(1), StoredAnswer("small", "m", vectors))
    async with opened(tmp_path, Hands()) as cache:
        found = await cache.lookup_disk(key(1), msgspec.structs.replace(REQUEST, kind="embedding"))
        assert found is not None
        assert found.answer.body == vectors


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is no database" * 1000)


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("spoil", [_garbage, _folder])
async def test_an_unreadable_file_is_set_aside_and_a_fresh_one_used(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """A damaged file is kept for whoever wants to look, counted, and replaced."""
    spoil(tmp_path / FILE)
    async with opened(tmp_path, Hands(), retry_s=60.0) as cache:
        cache.put(key(1), answer())
        await until(lambda: stored(tmp_path) == 1)
        disk = cache.stats().disk
        assert disk is not None
        assert (disk.corrupt_files, disk.lost_writes, disk.available) == (1, 0, True)
    assert (tmp_path / f"{FILE}.bad").exists()


async def test_a_file_that_is_damaged_while_in_use_is_replaced(tmp_path: Path) -> None:
    """Damage that shows only later costs the answers on disk, not those in memory, and no request."""
    async with opened(tmp_path, Hands()) as cache:
        for number in range(50):
            cache.put(key(number), answer("z" * 3000))
        await until(lambda: stored(tmp_path) == 50)
    data = bytearray((tmp_path / FILE).read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    (tmp_path / FILE).write_bytes(bytes(data))
    async with opened(tmp_path, Hands()) as cache:
        assert await cache.lookup_disk(key(7), REQUEST) is None
        cache.put(key(7), answer())
        await until(lambda: stored(tmp_path) == 1)
        disk = cache.stats().disk
        assert disk is not None
        assert disk.corrupt_files == 1


async def test_a_full_disk_is_counted_survived_and_tried_again(tmp_path: Path) -> None:
    """While nothing can be written answers stay in memory and losses are counted; with room again, writing goes on."""
    async with opened(tmp_path, Hands()) as cache:
        cache.put(key(1), answer())
        await until(lambda: stored(tmp_path) == 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (16 * 1024, hard)
        )  # what the kernel says then is what a full disk says
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


async def test_a_disk_that_cannot_be_used_at_all_leaves_the_memory(tmp_path: Path) -> None:
    """A state directory that is a file: no disk, no error, and the losses are counted."""
    (tmp_path / "state").write_text("not a folder")
    async with opened(tmp_path / "state", Hands(), retry_s=60.0) as cache:
        cache.put(key(1), answer())
        assert cache.lookup_memory(key(1)) is not None
        assert await cache.lookup_disk(key(2), REQUEST) is None
        await until(lambda: lost(cache) == 1)


async def test_what_another_version_wrote_is_no_answer(tmp_path: Path) -> None:
    """Bytes that cannot be read are a miss."""
    async with opened(tmp_path, Hands()) as cache:
        cache.put(key(1), answer())
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as database:
        database.execute("UPDATE answers SET value = x'01020304'")
    async with opened(tmp_path, Hands()) as cache:
        assert await cache.lookup_disk(key(1), REQUEST) is None


def every_byte(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


async def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """A stuck disk costs one short wait; after that it is left alone for a while, and then asked again."""
    hands, stuck = Hands(), threading.Event()
    async with opened(tmp_path, hands) as cache:
        cache.put(key(1), answer())
        await until(lambda: stored(tmp_path) == 1)
        cache._memory.clear()
        assert cache._journal is not None
        cache._journal.write(Write("SELECT ?", lambda: (float(stuck.wait(20.0)),)))
        await until(lambda: not cache._journal._writes)  # type: ignore[union-attr]
        assert await cache.lookup_disk(key(1), REQUEST) is None
        stuck.set()
        await until(lambda: not cache._journal._reads)  # type: ignore[union-attr]
        assert await cache.lookup_disk(key(1), REQUEST) is None, "not yet: it was slow a moment ago"
        hands.monotonic_s += 10.0
        found = await cache.lookup_disk(key(1), REQUEST)
        assert found is not None
        assert found.age_s == pytest.approx(10.0)


def lost(cache: AnswerCache) -> int:
    disk = cache.stats().disk
    return 0 if disk is None else disk.lost_writes
