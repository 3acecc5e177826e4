"""One replica of several is ten times slower: a simulation of the pool in virtual time. A request's first token comes
after 50 ms at an idle replica, 2 ms later for each other request there, and the whole answer after ten times that."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest

from causeway_server.cloud_pool.dispatch.dispatcher import EndpointLease

from .scripted_pool import Bed

pytestmark = pytest.mark.slow

RATE = 40.0  # requests a second
NAMES = ("a:1", "b:1", "c:1", "d:1")


class Run(msgspec.Struct):
    """Seconds to the first token, and the endpoint, of each request in arrival order."""

    first_s: list[float]
    endpoints: list[str]

    def p99_s(self) -> float:
        return sorted(self.first_s)[int(0.99 * len(self.first_s))]

    def share(self, endpoint: str) -> float:
        return Counter(self.endpoints)[endpoint] / len(self.endpoints)


def simulate(factors: Mapping[str, float], requests: int, *, seed: int = 3) -> Run:
    """`factors`: how much slower each endpoint is."""
    chance = random.Random(seed)
    bed = Bed(*NAMES, rng=chance.random)
    run, order = Run([], []), 0
    events: list[tuple[float, int, EndpointLease, float]] = []
    arrives = bed.clock.now
    for _ in range(requests):
        arrives += chance.expovariate(RATE)
        while events and events[0][0] <= arrives:
            bed.clock.now, _, lease, first_s = heapq.heappop(events)
            if first_s:
                lease.first_token(first_s)
            else:
                lease.succeeded()
                lease.close()
        bed.clock.now = arrives
        lease = bed.pool.lease()
        there = next(one.outstanding for one in bed.pool.endpoints if one.address == lease.endpoint)
        first_s = factors[lease.endpoint] * (0.05 + 0.002 * there) * chance.uniform(0.7, 1.4)
        for at, said in ((arrives + first_s, first_s), (arrives + 10 * first_s, 0.0)):
            order += 1
            heapq.heappush(events, (at, order, lease, said))
        run.first_s.append(first_s)
        run.endpoints.append(lease.endpoint)
    return run


@pytest.mark.parametrize("seed", range(4))
def test_one_slow_replica_gets_few_requests_and_p99_stays_within_one_and_a_half(seed: int) -> None:
    healthy = simulate(dict.fromkeys(NAMES, 1.0), 6000, seed=seed)
    slow = simulate(dict.fromkeys(NAMES, 1.0) | {"b:1": 10.0}, 6000, seed=seed)
    assert slow.share("b:1") < 0.01
    assert slow.p99_s() <= 1.5 * healthy.p99_s()


def test_random_differences_between_healthy_replicas_are_not_amplified() -> None:
    run = simulate(dict.fromkeys(NAMES, 1.0), 6000)
    assert all(abs(run.share(name) - 0.25) < 0.03 for name in NAMES)
