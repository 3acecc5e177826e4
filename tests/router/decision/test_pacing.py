"""The shadow price of a budget."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.decision.pacing import MAX_PRICE, Demand, Pacer, Steps, finite, steps_of

TWO = ((0.5, 0.0), (0.9, 0.002))


def pacer(*choices: tuple[tuple[float, float], ...], day: str = "2026-05-04") -> Pacer:
    """A pacer that has met these choices in the first hour of a day."""
    known = Pacer()
    for one in choices:
        known.offer(steps_of(one), day, 0)
    return known


@pytest.mark.parametrize(
    ("choices", "steps"),
    [
        ((), ()),
        (((0.5, 0.0),), ()),
        (TWO, ((200.0, 0.002),)),
        (((0.9, 0.0), (0.5, 0.002)), ()),  # the dear one is worse
        (((0.5, 0.0), (0.6, 0.002), (0.9, 0.002)), ((200.0, 0.002),)),  # the same price
        (((0.5, 0.0), (0.55, 0.001), (0.9, 0.002)), ((200.0, 0.002),)),  # below the hull
        (((0.5, 0.0), (0.8, 0.001), (0.9, 0.002)), ((300.0, 0.001), (100.0, 0.001))),
    ],
)
def test_only_steps_on_the_hull_are_worth_their_money(
    choices: tuple[tuple[float, float], ...], steps: tuple[tuple[float, float], ...]
) -> None:
    found = steps_of(choices)
    assert [(round(ratio, 6), round(usd, 6)) for ratio, usd in found.steps] == list(steps)
    assert found.least == (choices[0][1] if choices else 0.0)


def test_the_price_parts_what_the_budget_pays_for_from_the_rest() -> None:
    """A half gains 100 a dollar, a half 200; the day brings about 1,000 more of them at 0.002 USD."""
    known = pacer(*[TWO, ((0.5, 0.0), (0.7, 0.002))] * 50)
    count = known.expected(1.0)
    assert known.price(count * 0.002 * 1.01, "2026-05-04", 1.0) == 0.0
    assert known.price(count * 0.002 * 0.99, "2026-05-04", 1.0) == pytest.approx(100.0)
    assert known.price(count * 0.002 * 0.49, "2026-05-04", 1.0) == pytest.approx(200.0)
    assert known.price(0.0, "2026-05-04", 1.0) == MAX_PRICE


def test_nothing_is_held_back_for_a_day_that_is_over_or_unknown() -> None:
    assert Pacer().price(1.0, "2026-05-04", 3.0) == 0.0
    assert pacer(TWO).price(0.001, "2026-05-04", 24.0) == 0.0


def test_a_day_is_expected_to_be_like_the_days_before_and_like_today_so_far() -> None:
    known = Pacer()
    for day in range(1, 8):
        for _ in range(600):
            known.offer(Steps(0.0, ()), f"2026-05-{day:02}", 12)
    known.turn("2026-05-08")
    assert known.expected(0.0) == pytest.approx(600, rel=0.01)
    assert known.expected(13.0) == 0.0
    for _ in range(300):
        known.offer(Steps(0.0, ()), "2026-05-08", 12)
    assert known.expected(12.25) == pytest.approx(450 * 350 / 200, rel=0.01)  # twice as many as usual by then


def test_a_restart_remembers_the_usual_day() -> None:
    before = pacer(*[TWO] * 80)
    before.turn("2026-05-05")
    state = msgspec.json.decode(msgspec.json.encode(before.state()), type=Demand)
    assert Pacer(state).price(0.01, "2026-05-05", 0.0) == before.price(0.01, "2026-05-05", 0.0) > 0.0


def test_a_window_may_reach_into_the_next_day() -> None:
    """A watt-hour of heat is for the next minutes, also at the end of the day."""
    known = Pacer()
    assert known.expected(23.5, 24.5) == pytest.approx(2 * known.expected(23.5))
    assert known.expected(18.0, 21.0) == pytest.approx(known.expected(18.0) / 2)


def test_another_budget_s_exhaustion_is_not_an_offer() -> None:
    assert [finite(price) for price in (None, 3.0, MAX_PRICE)] == [0.0, 3.0, 0.0]
