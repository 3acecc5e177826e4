"""The store of decision records: bounds and queries."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest

from causeway_server.edge_node.storage.decisions import FILE, DecisionQuery, DecisionStore, _RowEncoder, read_stored
from causeway_server.router.decision.decide import decide, features_of
from causeway_server.router.errors import QueueFull
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.serving.at_rest.sealing import head_of
from causeway_server.router.types import (
    CloudSignals,
    DecisionRecord,
    DeviceSetup,
    DeviceSignals,
    Estimates,
    Message,
    Outcome,
    PromiseSignals,
    Request,
    Route,
    Snapshot,
)
from tests.waiting import until

from .encrypted import ReadableKeys, database_of
from .test_cache import ManualClock


def record(
    number: int,
    *,
    route: Route = "edge",
    target: str = "small",
    status: str = "ok",
    cache: str = "miss",
    created: float = 0.0,
) -> DecisionRecord:
    outcome = Outcome(status=status, http_status=200, route=route, target=target, cache=cache)  # type: ignore[arg-type]
    return DecisionRecord(
        id=f"d{number}",
        created=created or 1_000_000.0 + number,
        request=features_of(Request(kind="chat", model="auto", messages=(Message("user", "hello"),))),
        estimates=Estimates(),
        unrecorded=(),
        snapshot=Snapshot(),
        decision=None,
        outcome=outcome,
    )


def store(
    directory: Path | None, manual: ManualClock | None = None, count: int = 5, max_age_s: float = 86400.0
) -> DecisionStore:
    opened = DecisionStore(
        memory_records=count, max_age_s=max_age_s, directory=directory, clock=(manual or ManualClock()).clock
    )
    opened.start()
    return opened


POLICY = Path(__file__).parents[3] / "policies" / "default.yaml"
DEVICE = Snapshot(
    device=DeviceSignals(temperature_c=48.5, memory_free_mb=900.25),
    cloud=CloudSignals(reachable=True, rtt_ms=12.5, breaker="closed"),
    clouds={"main": CloudSignals(reachable=True, rtt_ms=12.5, breaker="closed")},
    down=frozenset({"large"}),
    setup=DeviceSetup(engine=True, cloud=True, clouds=("main",)),
    promises={"all": PromiseSignals(0.5, 120)},
)


def decided(number: int) -> DecisionRecord:
    """Return a record with a decision, its reasons, and estimates."""
    request = Request(kind="chat", model="auto", messages=(Message("user", "hello"),))
    policy, estimates = parse_policy(POLICY.read_text()), Estimates(prompt_tokens=number, pii_classes=("email",))
    decision = decide(policy, request, DEVICE, estimates)
    return msgspec.structs.replace(record(number), snapshot=DEVICE, estimates=estimates, decision=decision)


def opened(row: tuple[object, ...]) -> bytes:
    sealed = row[-1]
    assert isinstance(sealed, bytes)
    return sealed.removeprefix(head_of("none"))


def test_a_row_is_the_record_whatever_it_shares_with_others(tmp_path: Path) -> None:
    encoder, shared = _RowEncoder(ReadableKeys(tmp_path)), decided(0)
    for number in range(400):
        one = (record if number % 3 else decided)(number)
        if number % 2:
            changed = msgspec.structs.replace(shared.snapshot, down=frozenset({str(number)}))
            snapshot = shared.snapshot if number % 4 == 1 else changed
            one = msgspec.structs.replace(one, request=shared.request, snapshot=snapshot, shadow="other")
        row = encoder.row(one)
        assert msgspec.msgpack.decode(opened(row), type=DecisionRecord) == one
        assert row[0] == one.id


def test_a_page_of_the_file_has_two_rows(tmp_path: Path) -> None:
    usual = decided(7)
    assert len(msgspec.msgpack.encode(usual)) > 2048 > len(opened(_RowEncoder(ReadableKeys(tmp_path)).row(usual))) + 200


async def test_memory_keeps_the_newest() -> None:
    """An unknown id is None."""
    with closing(store(None, count=3)) as decisions:
        for number in range(5):
            decisions.add(record(number))
        assert await decisions.get("d1") is None
        assert await decisions.get("d4") == record(4)
        assert [found.id for found in await decisions.find(DecisionQuery())] == ["d4", "d3", "d2"]


@pytest.mark.parametrize("way", ["get", "find", "erase", "newest", "time"])
async def test_records_made_later_are_there_for_whoever_reads(way: str) -> None:
    """A record that cannot be made costs no other record."""
    with closing(store(None, count=100)) as decisions:
        decisions.later(partial(decisions.add, cast("DecisionRecord", None)))
        for number in range(70):
            decisions.later(partial(decisions.add, record(number)))
        assert not decisions.memory
        if way == "get":
            assert await decisions.get("d69") == record(69)
        elif way == "find":
            assert len(await decisions.find(DecisionQuery())) == 70
        elif way == "erase":
            assert await decisions.erase("") == 70
            assert not decisions.memory
        elif way == "newest":
            assert decisions.newest == record(69)
        else:
            await until(lambda: len(decisions.memory) == 70)


async def test_records_made_later_come_before_those_that_ended_after_them() -> None:
    with closing(store(None, count=100)) as decisions:
        decisions.later(partial(decisions.add, record(0)))
        decisions.add(record(1))
        decisions.later(partial(decisions.add, record(2)))
        decisions.add(record(3))
        assert [*decisions.memory] == ["d0", "d1", "d2", "d3"]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        (DecisionQuery(route="cloud"), ["d3"]),
        (DecisionQuery(target="small"), ["d2", "d1"]),
        (DecisionQuery(status="error"), ["d2"]),
        (DecisionQuery(since=1_000_002.0), ["d3", "d2"]),
        (DecisionQuery(limit=1), ["d3"]),
        (DecisionQuery(route="cloud", status="error"), []),
    ],
)
async def test_filters_select_the_same_records_in_memory_and_on_disk(
    tmp_path: Path, query: DecisionQuery, ids: list[str]
) -> None:
    records = [record(1), record(2, status="error"), record(3, route="cloud", target="large")]
    with closing(store(tmp_path)) as decisions:
        for one in records:
            decisions.add(one)
        assert [found.id for found in await decisions.find(query)] == ids
    with closing(store(tmp_path)) as decisions:
        assert [found.id for found in await decisions.find(query)] == ids


async def test_older_records_come_from_the_disk_once_each(tmp_path: Path) -> None:
    with closing(store(tmp_path, count=2)) as decisions:
        for number in range(6):
            decisions.add(record(number))
        decisions.add(record(6, cache="hit"))
    with closing(store(tmp_path, count=2)) as decisions:
        decisions.add(record(7))
        assert [found.id for found in await decisions.find(DecisionQuery(limit=4))] == ["d7", "d5", "d4", "d3"]
        assert await decisions.get("d0") == record(0)
        assert await decisions.get("d6") is None, "records of cache hits are not written to disk"


async def test_old_records_leave_the_disk(tmp_path: Path) -> None:
    manual = ManualClock()
    with closing(store(tmp_path, manual, max_age_s=10.0)) as decisions:
        decisions.add(record(1, created=manual.unix_s))
    manual.unix_s += 60.0
    manual.monotonic_s += 60.0
    with closing(store(tmp_path, manual, max_age_s=10.0)) as decisions:
        assert await decisions.get("d1") is not None
        decisions.add(record(2, created=manual.unix_s))
    with closing(store(tmp_path, manual)) as decisions:
        await until(lambda: (stats := decisions.disk()) is not None and stats.available)
        assert await decisions.get("d1") is None
        assert await decisions.get("d2") is not None


async def written(decisions: DecisionStore, number: int, created: float) -> None:
    """Add a record, and wait until it is on disk, whatever else is deleted then."""
    decisions.add(record(number, created=created))
    stats = decisions.disk
    await until(lambda: (found := stats()) is not None and found.available and not found.queued_writes)


@pytest.mark.parametrize("jump_s", [400 * 86400.0, -400 * 86400.0])
async def test_a_wall_clock_that_jumps_deletes_no_record(tmp_path: Path, jump_s: float) -> None:
    """Neither while it is wrong nor when it is right again; what is old by the device's own time goes."""
    manual = ManualClock()
    for number, unix in enumerate((1e9, 1e9 + jump_s, 1e9)):
        manual.unix_s = unix
        manual.monotonic_s += 10.0
        with closing(store(tmp_path, manual, max_age_s=25.0)) as decisions:
            await written(decisions, number, unix)
    with closing(store(tmp_path, manual, max_age_s=25.0, count=1)) as decisions:
        assert [await decisions.get(f"d{number}") is not None for number in range(3)] == [True] * 3
    manual.monotonic_s += 10.0
    with closing(store(tmp_path, manual, max_age_s=25.0)) as decisions:
        await written(decisions, 3, 1e9)
    with closing(store(tmp_path, manual, max_age_s=25.0)) as decisions:
        assert [await decisions.get(f"d{number}") is not None for number in range(4)] == [False, True, True, True]


async def test_records_of_an_older_version_age_from_now_on(tmp_path: Path) -> None:
    """An upgrade, and a row without an age."""
    manual = ManualClock()
    older = (
        "CREATE TABLE decisions (id TEXT PRIMARY KEY, created REAL, route TEXT, target TEXT, status TEXT, record BLOB)"
    )
    insert = "INSERT OR REPLACE INTO decisions VALUES (?, ?, 'edge', 'small', 'ok', ?)"
    with closing(sqlite3.connect(tmp_path / "decisions-1.sqlite")) as database, database:
        database.execute(older)
        database.execute(insert, ("d0", 1.0, msgspec.msgpack.encode(record(0))))
    with closing(store(tmp_path, manual, max_age_s=10.0)) as decisions:
        await written(decisions, 1, 1e9)
        assert await decisions.get("d0") is not None
    with database_of(tmp_path / FILE) as database:
        row = ("d2", 1e9, msgspec.msgpack.encode(record(2)))
        database.execute("INSERT INTO decisions VALUES (?1, ?2, 'edge', 'small', 'ok', seal(?3, 'decisions', ?1))", row)
    manual.monotonic_s += 11.0
    with closing(store(tmp_path, manual, max_age_s=10.0)) as decisions:
        await written(decisions, 3, 1e9)
    with closing(store(tmp_path, manual, max_age_s=10.0)) as decisions:
        assert [await decisions.get(f"d{number}") is not None for number in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("strange", [b"sm\xffll", b"\xc1mall"], ids=["not UTF-8", "bit rot"])
async def test_a_record_that_cannot_be_read_hides_no_other(tmp_path: Path, strange: bytes) -> None:
    with closing(store(tmp_path)) as decisions:
        for number in range(3):
            decisions.add(record(number))
    with database_of(tmp_path / FILE) as database:
        (row,) = database.execute("SELECT opened(record, 'decisions', id) FROM decisions WHERE id = 'd1'").fetchone()
        statement = "UPDATE decisions SET record = seal(?, 'decisions', id) WHERE id = 'd1'"
        database.execute(statement, (row.replace(b"small", strange),))
    with closing(store(tmp_path)) as decisions:
        assert [found.id for found in await decisions.find(DecisionQuery())] == ["d2", "d0"]
        assert await decisions.get("d1") is None
    stored = read_stored(tmp_path)
    assert [found.id for found in stored.records] == ["d0", "d2"]
    assert stored.unreadable() == 1


async def test_a_folder_is_read_while_a_daemon_writes_to_it(tmp_path: Path) -> None:
    """Oldest first, and only the asked time."""
    with closing(store(tmp_path)) as decisions:
        for number in range(3):
            decisions.add(record(number))
        assert await decisions.get("unknown") is None, "the file is open from here on"
        await until(lambda: len(list(read_stored(tmp_path).records)) == 3)
        assert [one.id for one in read_stored(tmp_path, since=1_000_001.0).records] == ["d1", "d2"]
    assert [one.id for one in read_stored(tmp_path).records] == ["d0", "d1", "d2"]


async def test_rows_of_another_version_are_counted(tmp_path: Path) -> None:
    with closing(store(tmp_path)) as decisions:
        decisions.add(record(1))
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("INSERT INTO decisions VALUES ('old', 5.0, 'edge', 'small', 'ok', ?)", (b"\x80",))
        database.commit()
    stored = read_stored(tmp_path)
    assert [one.id for one in stored.records] == ["d1"]
    assert stored.unreadable() == 1


def test_a_folder_without_records_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_stored(tmp_path)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(OSError, match=FILE):
        list(read_stored(tmp_path).records)


async def test_searches_of_one_client_leave_room_for_others(tmp_path: Path) -> None:
    """Each reads the whole file in one thread, and a search that waits for a second finds nothing."""
    with closing(store(tmp_path, count=1)) as decisions:
        for number in range(3):
            decisions.add(record(number))
        await until(lambda: (stats := decisions.disk()) is not None and not stats.queued_writes)
        names = ["flood"] * 9 + ["quiet", "quiet", "new"]
        found = await asyncio.gather(*(decisions.find(DecisionQuery(), name) for name in names), return_exceptions=True)
        assert [isinstance(one, QueueFull) for one in found] == [False] * 4 + [True] * 5 + [False] * 3
        assert [[one.id for one in records] for records in found if isinstance(records, list)] == [
            ["d2", "d1", "d0"]
        ] * 7
        assert len(await decisions.find(DecisionQuery(), "flood")) == 3
