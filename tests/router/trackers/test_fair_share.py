"""Shares of a bounded pool: pure."""

from __future__ import annotations

import pytest

from causeway_server.router.trackers import FairShare, network_of, stored_share


def fill(pool: FairShare, caller: str) -> int:
    """Take places until one is refused, and return how many there were."""
    taken = 0
    while pool.hold((caller, taken), caller):
        taken += 1
    return taken


@pytest.mark.parametrize("capacity", [2, 8, 64, 1024])
def test_one_caller_gets_half(capacity: int) -> None:
    assert fill(FairShare(capacity), "flood") == capacity // 2


def test_pool_of_one_place_has_one_holder() -> None:
    assert fill(FairShare(1), "flood") == 1


@pytest.mark.parametrize("floods", [1, 2, 3, 5])
def test_new_caller_finds_room_beside_any_floods(floods: int) -> None:
    pool = FairShare(1024)
    for number in range(floods):
        fill(pool, f"flood-{number}")
    assert fill(pool, "quiet") >= 1024 // 2 ** (floods + 2)
    assert pool.hold("new", "new")


def test_flood_gives_up_its_share_as_its_places_end() -> None:
    """Two callers that both want all of it settle at a third each."""
    pool = FairShare(90)
    taken = fill(pool, "flood")
    fill(pool, "quiet")
    for number in range(taken):
        pool.release(("flood", number))
        pool.hold(("flood", number), "flood")
        pool.hold(("quiet again", number), "quiet")
    assert pool.held_by("flood") == pool.held_by("quiet") == 30


def test_first_holding_may_be_large() -> None:
    """A pool of bytes: the first body of the quiet caller may have all that is free; its second may not."""
    pool = FairShare(100)
    assert pool.hold("a", "flood", 50)
    assert pool.hold("b", "quiet", 45)
    assert not pool.hold("c", "quiet", 5)
    assert not pool.hold("d", "flood", 1)
    assert pool.held == 95


def test_holding_grows_and_shrinks_in_place() -> None:
    pool = FairShare(100)
    for amount in (10, 50, 5):
        assert pool.hold("a", "one", amount)
        assert (pool.held, pool.held_by("one")) == (amount, amount)
    assert not pool.hold("a", "one", 51)
    assert pool.held == 5


@pytest.mark.parametrize("times", [1, 2])
def test_release_ends_a_holding_once(times: int) -> None:
    pool = FairShare(4)
    pool.hold("a", "one")
    pool.hold("b", "two")
    for _ in range(times):
        pool.release("a")
    assert (pool.held, pool.held_by("one"), pool.held_by("two")) == (1, 0, 1)


def test_largest_caller_gives_way() -> None:
    pool = FairShare(8)
    for number in range(7):
        pool.count(number, "flood")
    pool.count("quiet", "quiet")
    assert pool.crowds("flood")
    assert not pool.crowds("quiet")
    assert FairShare(8).crowds("anyone")


@pytest.mark.parametrize(("capacity", "alone", "beside"), [(1, 1, 1), (2, 2, 1), (8, 7, 4), (200, 175, 100)])
def test_stored_pool_keeps_room_for_a_caller_that_comes_new(capacity: int, alone: int, beside: int) -> None:
    assert (stored_share(capacity, others=False), stored_share(capacity, others=True)) == (alone, beside)


@pytest.mark.parametrize(
    ("address", "caller"),
    [("10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::/64"), ("::ffff:10.0.0.1", "10.0.0.1"), ("kiosk", "kiosk")],
)
def test_caller_of_an_address(address: str, caller: str) -> None:
    assert network_of(address) == caller
