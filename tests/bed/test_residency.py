"""The bed of two regions in small: no byte of a bound request reaches the other region, whatever is cut."""

from __future__ import annotations

import pytest

from .residency import STAGES, load, measure, running

pytestmark = pytest.mark.slow


async def test_nothing_of_a_bound_request_reaches_the_other_region() -> None:
    """Under the faults of a server, the cut of the gateway at home, and of the ways between the regions."""
    async with running() as bed:
        rows = await measure(bed, 80, (STAGES[0], STAGES[1], STAGES[5], STAGES[7]))
    assert [row.name for row in rows if row.holds is not True] == []


async def test_the_instrument_sees_what_is_not_bound() -> None:
    """The same requests without a binding go to the cloud that the policy lists first."""
    async with running() as bed:
        ended = await load(bed, 0, 20, bound=False)
        assert ended["device 200"] == 10
        assert bed.elsewhere > 0
        assert sum(way.probes for way in bed.ways.values()) > 0
