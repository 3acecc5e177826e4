"""A gateway and a worker before one server, in virtual time: jobs use what requests leave."""

from __future__ import annotations

import statistics

import pytest

from causeway_server.cloud_pool.admission.division import (
    JobShare,
    PeerState,
    gateway_permits,
    reserved_for_jobs,
    worker_permits,
)
from causeway_server.cloud_pool.admission.peer_heartbeat import EVERY_S
from causeway_server.cloud_pool.admission.permits import AdmissionSettings, TierCapacity
from causeway_server.cloud_pool.admission.scheduler import AdmissionScheduler
from causeway_server.cloud_pool.admission.waiting import Ticket

from .simulation import (
    Callers,
    RequestResult,
    Run,
    Server,
    Simulation,
    first_token_times,
    flat,
    quantile,
    server,
    settings,
)

pytestmark = pytest.mark.slow
JOBS = Callers(flat(0.0), "standard", tenant="batch", patience_s=1e6)
BEGINS_S, ENDS_S = 20.0, 220.0
SEEDS = range(1, 4)


class BesideJobs(Simulation):
    """A worker with an endless backlog; both sides' permits are divided as by their heartbeats."""

    def __init__(self, server: Server, callers: list[Callers], settings: AdmissionSettings, seed: int) -> None:
        super().__init__(server, callers, settings, seed)
        self._gateway = self.scheduler
        self._worker = AdmissionScheduler(settings, 0.0)
        self._permits = settings.permits
        self._share = JobShare()
        self._jobs: set[Ticket] = set()
        self._demand, self._gateway_part = 0.0, settings.permits
        self._worker_part = self._announced = 0
        self._worker.set_upper_bound(0, 0.0)
        self._at(0.0, self._beat)

    def _beat(self, now: float) -> None:
        self._at(now + EVERY_S, self._beat)
        self._demand = max(float(self._gateway.demand), 0.8 * self._demand)
        peers = {
            "g": PeerState("gateway", self._demand, self._gateway.demand, self._gateway.lacks_capacity(now)),
            "w": PeerState("worker", 1e6, self._worker.demand, part=self._worker_part),
        }
        parts = gateway_permits(self._permits, peers)
        capacity = TierCapacity(self._permits, 1.0, reserved_for_jobs(parts, peers)["g"])
        self._hand_over(now, self._gateway.set_upper_bound(min(parts["g"], self._gateway_part), now, capacity))
        self._gateway_part = parts["g"]
        part = worker_permits(self._share.permits(self._permits, peers, now), peers)["w"]
        bound = min(part, self._worker_part, self._announced)
        self._hand_over(now, self._worker.set_upper_bound(bound, now, capacity))
        self._worker_part, self._announced = part, self._worker_part
        self._claim(now)

    def _claim(self, now: float) -> None:
        while self._worker.demand < self._worker.limit:
            ticket = Ticket(JOBS.priority, JOBS.tenant, 1.0, 1.0, now, now + JOBS.patience_s)
            self._jobs.add(ticket)
            result = self._results[ticket] = RequestResult(JOBS, now)
            self.run.results.append(result)
            self._worker.arrive(ticket, now)
            if ticket.has_permit:
                self._hand_over(now, [ticket])

    def _first(self, now: float, ticket: Ticket) -> None:
        self.scheduler = self._worker if ticket in self._jobs else self._gateway
        super()._first(now, ticket)
        self.scheduler = self._gateway

    def _end(self, now: float, ticket: Ticket) -> None:
        self.scheduler = self._worker if ticket in self._jobs else self._gateway
        super()._end(now, ticket)
        self.scheduler = self._gateway
        self._claim(now)


def p99(run: Run) -> float:
    requests = [one for one in run.of(BEGINS_S, ENDS_S, priority="interactive") if one.callers is not JOBS]
    return quantile(first_token_times(requests), 0.99)


def jobs_per_s(run: Run) -> float:
    """Jobs that ended."""
    jobs = [one for one in run.of(BEGINS_S, ENDS_S) if one.callers is JOBS and one.done_s]
    return len(jobs) / (ENDS_S - BEGINS_S)


@pytest.mark.parametrize(("load", "least_jobs"), [(0.3, 0.3), (0.5, 0.1)])
def test_jobs_use_what_is_left_and_first_tokens_come_as_before(load: float, least_jobs: float) -> None:
    """As shares of the capacity of 64 sequences; the p99 to the first token is within 1.3 times that without jobs."""
    tier = server(64, 0.3, 2.0)
    calls = [Callers(flat(load * tier.capacity()))]
    without = [Simulation(tier, calls, settings(64), seed).until(ENDS_S) for seed in SEEDS]
    beside = [BesideJobs(tier, calls, settings(64), seed).until(ENDS_S) for seed in SEEDS]
    assert statistics.median(map(p99, beside)) <= 1.3 * statistics.median(map(p99, without))
    assert min(map(jobs_per_s, beside)) >= least_jobs * tier.capacity()


def test_jobs_use_an_idle_tier() -> None:
    tier = server(64, 0.3, 2.0)
    run = BesideJobs(tier, [], settings(64), seed=1).until(ENDS_S)
    assert jobs_per_s(run) >= 0.9 * tier.capacity()


def test_a_full_tier_runs_hardly_any_jobs_but_some() -> None:
    tier = server(16, 0.2, 0.3)
    run = BesideJobs(tier, [Callers(flat(2.0 * tier.capacity()), "standard")], settings(16), seed=1).until(ENDS_S)
    assert 0.0 < jobs_per_s(run) <= 0.05 * tier.capacity()
