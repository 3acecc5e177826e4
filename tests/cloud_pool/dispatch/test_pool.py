"""Leases on a pool, and its endpoints while it is watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial

import anyio
import pytest

from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.dispatch.endpoint_selection import Prompt
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudUnreachable,
    DeadlineExceeded,
    EngineUnavailable,
    StreamBroken,
)
from tests.waiting import until

from .scripted_pool import Bed

REFUSED = CloudUnreachable("no", phase="connect")


@asynccontextmanager
async def watching(bed: Bed) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bed.pool.watch)
        with anyio.fail_after(60.0):
            yield
        tasks.cancel_scope.cancel()


def outstanding(bed: Bed) -> list[int]:
    return [one.outstanding for one in bed.pool.endpoints]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_lease_counts_while_it_is_open() -> None:
    bed = Bed("a:1", "b:1")
    first = bed.pool.lease()
    with closing(bed.pool.lease()) as second:
        assert {first.endpoint, second.endpoint} == {"a:1", "b:1"}
        assert outstanding(bed) == [1, 1]
    second.close()
    assert sum(outstanding(bed)) == 1
    first.close()
    assert outstanding(bed) == [0, 0]


@pytest.mark.parametrize("how", ["fails", "cancelled"])
async def test_a_lease_is_closed_however_the_call_ends(how: str) -> None:
    bed = Bed("a:1", "b:1")
    taken = asyncio.Event()

    async def call() -> None:
        with closing(bed.pool.lease()) as lease:
            taken.set()
            if how == "fails":
                lease.failed(CloudFailed("no"))
                raise CloudFailed("no")
            await asyncio.Event().wait()

    task = asyncio.ensure_future(call())
    await taken.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert outstanding(bed) == [0, 0]
    assert bed.pool.healthy == 2


def test_measured_first_tokens_steer_the_selection() -> None:
    """A lease reports its first token once only."""
    bed = Bed("a:1", "b:1")
    for address, seconds in (("a:1", 1.0), ("b:1", 0.05)):
        with closing(bed.pool.lease(excluding={"a:1", "b:1"} - {address})) as lease:
            lease.first_token(seconds)
            lease.first_token(9.0)
            lease.succeeded()
    assert [one.ttft_s for one in bed.pool.endpoints] == [1.0, 0.05]
    for _ in range(5):
        with closing(bed.pool.lease()) as lease:
            assert lease.endpoint == "b:1"


def test_a_prompt_returns_to_the_endpoint_that_has_its_blocks() -> None:
    """An endpoint that was ejected may have been restarted: it is presumed to have none."""
    bed = Bed("a:1", "b:1", "c:1")
    prompt, longer = Prompt(1000, b"k", blocks=(1, 2, 3)), Prompt(1200, b"other", blocks=(1, 2, 3, 4))
    with closing(bed.pool.lease(prompt=prompt)) as lease:
        first = lease.endpoint
    with closing(bed.pool.lease(prompt=prompt, excluding={first})) as lease:
        second = lease.endpoint
        lease.failed(REFUSED)
    assert bed.phases()[second] == "ejected"
    assert bed.pool.prefixes.cached_tokens(longer.blocks).keys() == {first}
    bed.pool.set_endpoints({})
    assert bed.pool.prefixes.cached_tokens(longer.blocks) == {}


def test_without_an_endpoint_the_error_has_a_retry_after() -> None:
    bed = Bed("a:1")
    with pytest.raises(CloudUnreachable) as raised:
        bed.pool.lease(excluding={"a:1"})
    assert raised.value.retry_after_s == 1.0
    empty = Bed("dns:name:1")
    empty.pool.set_endpoints({})
    with pytest.raises(CloudUnreachable):
        Bed().pool.lease()


# --- watched ---------------------------------------------------------------------------------------------------------


async def test_an_ejected_endpoint_returns_after_a_successful_probe() -> None:
    bed = Bed("a:1", "b:1")
    bed.at("a:1").fault = REFUSED
    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            lease.failed(REFUSED)
        assert bed.phases() == {"a:1": "ejected", "b:1": "active"}
        with closing(bed.pool.lease()) as lease:
            assert lease.endpoint == "b:1"
        bed.clock.now += 0.6
        await until(lambda: bed.at("a:1").probes == 1)
        assert bed.phases()["a:1"] == "ejected"
        bed.at("a:1").fault = None
        bed.clock.now += 1.1
        await until(lambda: bed.phases()["a:1"] == "active")
    assert bed.ejections == [("large", "cloud_unreachable")]
    assert bed.at("b:1").probes == 0


async def test_a_pool_of_one_is_unavailable_until_its_probe_succeeds() -> None:
    bed = Bed("a:1")
    bed.at("a:1").fault = EngineUnavailable("loading")
    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            lease.failed(EngineUnavailable("loading"))
        assert bed.pool.healthy == 1
        await until(lambda: bed.pool.healthy == 0)
        with pytest.raises(EngineUnavailable):
            bed.pool.lease()
        bed.at("a:1").fault = None
        bed.clock.now += 0.5
        await until(lambda: bed.pool.healthy == 1)


async def test_a_hung_endpoint_is_found_while_calls_wait() -> None:
    """No deadline has passed yet: silence with work causes a probe, and its failure ejects. Calls without a token are
    ended at once, to be retried elsewhere; the others later."""
    bed = Bed("a:1", "b:1", settings=LoadBalancingConfig(probe_timeout_s=0.05))
    bed.at("a:1").hangs = True
    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            assert lease.endpoint == "a:1"
            bed.clock.now += 1.0
            await until(lambda: bed.pool.healthy == 1)
            assert bed.at("a:1").ended == []
            bed.clock.now += 1.0
            await until(lambda: bed.at("a:1").ended != [])
            assert not any(begun for _, begun in bed.at("a:1").ended)
            bed.clock.now += 8.0
            await until(lambda: bed.at("a:1").ended[-1][1])
        assert bed.at("b:1").ended == []


async def test_a_late_probe_of_a_responding_endpoint_does_not_eject() -> None:
    bed = Bed("a:1", settings=LoadBalancingConfig(probe_timeout_s=0.05))
    bed.at("a:1").hangs = True
    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            bed.clock.now += 1.0
            await until(lambda: bed.at("a:1").probes == 1)
            bed.at("a:1").last_received = bed.clock.now
            with anyio.move_on_after(0.2):
                await until(lambda: bed.pool.healthy == 0)
            assert bed.pool.healthy == 1
            lease.failed(DeadlineExceeded("too late"))
        assert bed.pool.healthy == 1


async def test_an_unlisted_endpoint_drains() -> None:
    bed = Bed("a:1", "b:1")
    running = bed.pool.lease()
    bed.pool.set_endpoints({"b:1": ""})
    assert bed.phases() == {"a:1": "draining", "b:1": "active"}
    for _ in range(3):
        with closing(bed.pool.lease()) as lease:
            assert lease.endpoint == "b:1"
    running.succeeded()
    running.close()
    assert bed.phases() == {"b:1": "active"}


async def test_check_probes_every_endpoint() -> None:
    bed = Bed("a:1", "b:1")
    bed.at("b:1").fault = CloudFailed("no")
    assert await bed.pool.check() == {"a:1": "", "b:1": "cloud_failed"}


@pytest.mark.parametrize(("configured_s", "given_s"), [(1.5, 3.0), (60.0, 60.0)])
async def test_a_slow_server_has_the_configured_time_for_its_check(configured_s: float, given_s: float) -> None:
    """A processor under load needs longer than a GPU: with a fixed time its gateway would never be ready."""
    bed = Bed("a:1", settings=LoadBalancingConfig(probe_timeout_s=configured_s))
    assert await bed.pool.check() == {"a:1": ""}
    assert bed.at("a:1").probe_timeout_s == given_s


async def test_a_cancelled_probe_can_be_repeated() -> None:
    bed = Bed("a:1", "b:1", settings=LoadBalancingConfig(probe_timeout_s=30.0))
    bed.at("a:1").hangs = True
    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            lease.failed(REFUSED)
        bed.clock.now += 1.0
        await until(lambda: bed.at("a:1").probes == 1)
    assert not bed.pool.endpoints[0].probing


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (REFUSED, CloudUnreachable),
        (DeadlineExceeded("no"), CloudUnreachable),
        (EngineUnavailable("no"), EngineUnavailable),
        (CloudFailed("no"), EngineUnavailable),
        (StreamBroken("no", phase="stream"), EngineUnavailable),
    ],
)
async def test_the_error_class_tells_unreachable_from_unavailable(
    fault: CausewayError, kind: type[CausewayError]
) -> None:
    bed = Bed("a:1")
    bed.at("a:1").fault = fault
    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            lease.failed(REFUSED)
        await until(lambda: bed.at("a:1").probes >= 1)
        bed.clock.now += LoadBalancingConfig().hung_after_s  # silence is proof by then
        await until(lambda: bed.pool.healthy == 0)
        with pytest.raises(kind):
            bed.pool.lease()


@pytest.mark.slow
async def test_retry_after_grows_with_the_outage() -> None:
    bed = Bed("a:1")
    bed.at("a:1").fault = REFUSED

    def probed(times: int) -> bool:
        return bed.at("a:1").probes == times and not bed.pool.endpoints[0].probing

    async with watching(bed):
        with closing(bed.pool.lease()) as lease:
            lease.failed(REFUSED)
        retry_after_s = []
        for count in range(1, 8):
            await until(partial(probed, count))
            with pytest.raises(CloudUnreachable) as raised:
                bed.pool.lease()
            retry_after_s.append(raised.value.retry_after_s)
            bed.clock.now += 0.5
    assert retry_after_s == [1.0, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def errors() -> list[CausewayError]:
    return [REFUSED, CloudFailed("no"), DeadlineExceeded("no")]


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.code)
def test_a_lease_reports_one_outcome_only(error: CausewayError) -> None:
    bed = Bed("a:1", "b:1")
    with closing(bed.pool.lease()) as lease:
        lease.succeeded()
        lease.failed(error)
    lease.failed(error)
    assert bed.pool.endpoints == Bed("a:1", "b:1").pool.endpoints
