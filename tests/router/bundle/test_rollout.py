"""Who belongs to a rollout: ramps nest, devices that appear later fall into place, pins and holds come first."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.bundle.manifest import (
    WHOLE,
    RolloutPlan,
    assigned_bundle,
    encode_canonical,
    in_share,
    position,
    read_plan,
)
from causeway_server.router.bundle.refusals import BundleInvalid

OLD, NEW, OWN, STRANGE = (digit * 64 for digit in "abcd")
PLAN = RolloutPlan("kiosk", "r-1", OLD, NEW, "salt", 0, {}, frozenset())
DEVICES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)
SHARES = st.integers(0, WHOLE)


def members(share: int, salt: str = "salt", devices: int = 2000) -> set[str]:
    plan = msgspec.structs.replace(PLAN, share=share, salt=salt)
    names = (f"device-{number}" for number in range(devices))
    return {name for name in names if assigned_bundle(plan, name, OLD) == NEW}


@given(device=DEVICES, shares=st.tuples(SHARES, SHARES))
def test_ramps_nest(device: str, shares: tuple[int, int]) -> None:
    """A device of a smaller share is in every larger one."""
    small, large = (msgspec.structs.replace(PLAN, share=share) for share in sorted(shares))
    assert in_share(large, device) or not in_share(small, device)


@given(device=DEVICES)
def test_none_and_all(device: str) -> None:
    assert assigned_bundle(PLAN, device, OLD) == OLD
    assert assigned_bundle(msgspec.structs.replace(PLAN, share=WHOLE), device, OLD) == NEW


def test_a_share_has_about_its_share_of_the_devices() -> None:
    """Hashes are fixed, so these counts never change: within 3 standard deviations of the binomial."""
    for share, expected in ((1_000, 20), (5_000, 100), (50_000, 1000)):
        spread = (expected * (1 - share / WHOLE)) ** 0.5
        assert abs(len(members(share)) - expected) < 3 * spread


def test_devices_that_appear_later_change_nothing_for_the_others() -> None:
    assert members(5_000, devices=1000) <= members(5_000, devices=2000)


def test_another_salt_draws_other_devices() -> None:
    assert members(5_000) != members(5_000, salt="next")


def test_the_position_is_fixed() -> None:
    """Devices of different releases agree on it."""
    assert position("salt", "device-1") == 67854


@given(share=SHARES)
def test_pins_and_holds_come_before_the_share(share: int) -> None:
    plan = msgspec.structs.replace(PLAN, share=share, pins={"a": OWN, "b": OWN}, holds=frozenset({"b", "c"}))
    assert assigned_bundle(plan, "a", OLD) == OWN
    assert assigned_bundle(plan, "b", OLD) == OWN
    assert assigned_bundle(plan, "c", STRANGE) == STRANGE
    assert assigned_bundle(plan, "c", None) is None


def test_a_smaller_share_takes_the_bundle_back() -> None:
    assert assigned_bundle(PLAN, "device-1", NEW) == OLD


def test_the_first_bundle_of_a_cohort_leaves_the_others_alone() -> None:
    first = msgspec.structs.replace(PLAN, from_bundle=None)
    assert assigned_bundle(first, "device-1", None) is None
    assert first.bundles == {NEW}


def test_a_plan_names_its_bundles() -> None:
    assert msgspec.structs.replace(PLAN, pins={"a": OWN}).bundles == {OLD, NEW, OWN}


def test_reading_gives_what_was_written() -> None:
    plan = msgspec.structs.replace(PLAN, share=5, pins={"b": OWN, "a": OWN}, holds=frozenset({"z", "y"}))
    assert read_plan(encode_canonical(plan), "kiosk") == plan


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (encode_canonical(PLAN)[:-1], "truncated"),
        (encode_canonical(PLAN).replace(b'"kiosk"', b'"office"'), "the plan of another cohort, office"),
        (encode_canonical(PLAN).replace(b'"share":0', b'"share":100001'), "share"),
        (encode_canonical(PLAN).replace(b'"salt":"salt"', b'"salt":"a:b"'), "salt"),
        (encode_canonical(PLAN).replace(b'"pins":{}', b'"pins":{"a":"x"}'), "pins"),
        (encode_canonical(PLAN) + b" " * 1024 * 1024, "larger than"),
    ],
)
def test_a_malformed_plan_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(BundleInvalid, match=words):
        read_plan(content, "kiosk")
