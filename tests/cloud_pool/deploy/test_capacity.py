"""The capacity calculator: its formulas against known values and a simulated queue, and its command."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.cli.plan import plan_command
from causeway_server.cloud_pool.planning import (
    ExpectedLoad,
    Lengths,
    MeasuredEndpoint,
    PlanTargets,
    ReplicaProfile,
    ThroughputPoint,
    decode_tokens_per_s,
    erlang_c,
    lengths_of,
    measure,
    plan,
)
from causeway_server.router.errors import ConfigError

LOAD = ExpectedLoad(peak_rps=10.0, prompt=Lengths(400.0), completion=Lengths(100.0))
# One request is 0.1 s + 0.2 s of a replica.
REPLICA = ReplicaProfile(
    prefill_tokens_per_s=4000.0, decode=(ThroughputPoint(1, 100.0), ThroughputPoint(8, 500.0)), usd_per_hour=2.0
)


@pytest.mark.parametrize(
    ("servers", "offered", "probability"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092), (100, 90.0, 0.2170), (5, 5.0, 1.0), (3, 9.0, 1.0)],
)
def test_erlang_c_matches_published_values(servers: int, offered: float, probability: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(probability, abs=5e-4)


@given(st.integers(1, 3000), st.floats(0.001, 0.999))
def test_erlang_c_is_a_probability(servers: int, utilisation: float) -> None:
    assert 0.0 <= erlang_c(servers, servers * utilisation) <= 1.0


def test_replicas_without_and_with_redundancy() -> None:
    """Ten requests a second of 0.3 s each keep three replicas busy: five at 70 %, six with one spare."""
    found = plan(LOAD, REPLICA, PlanTargets())
    assert found.request_s == pytest.approx(0.3)
    assert (found.needed, found.replicas, found.slots) == (5, 6, 8)
    assert found.utilisation == pytest.approx(0.5)
    assert found.utilisation_after_loss == pytest.approx(0.6)
    assert found.usd_per_hour == 12.0
    assert found.usd_per_million_tokens == pytest.approx(12.0 / (3600 * 10 * 500) * 1_000_000)


def test_overhead_is_work_too() -> None:
    assert plan(LOAD, msgspec.structs.replace(REPLICA, overhead_s=0.1), PlanTargets()).request_s == pytest.approx(0.4)


def test_rounding_adds_no_replica() -> None:
    load = msgspec.structs.replace(LOAD, peak_rps=0.7 * 10 / 0.3)
    assert plan(load, REPLICA, PlanTargets(spare_replicas=0)).replicas == 10


@given(
    st.floats(0.1, 500), st.integers(1, 5), st.integers(0, 3), st.floats(0.2, 0.95), st.floats(0, 2), st.floats(0, 2)
)
def test_after_any_loss_the_utilisation_holds(
    rps: float, zones: int, spare: int, utilisation: float, prompt_cv: float, completion_cv: float
) -> None:
    load = ExpectedLoad(peak_rps=rps, prompt=Lengths(400.0, prompt_cv), completion=Lengths(100.0, completion_cv))
    found = plan(load, REPLICA, PlanTargets(utilisation=utilisation, zones=zones, spare_replicas=spare))
    assert found.utilisation <= found.utilisation_after_loss <= utilisation + 1e-9
    assert found.replicas == found.per_zone * zones
    assert found.replicas >= found.needed + spare
    assert 0 <= found.wait_mean_s < math.inf
    assert 0 <= found.wait_p99_s < math.inf


def simulated_wait(servers: int, rate: float, service_s: list[float], chance: random.Random) -> float:
    """Return the mean wait of a simulated first-come queue."""
    free = [0.0] * servers
    now = total = 0.0
    for service in service_s:
        now += chance.expovariate(rate)
        begins = max(now, heapq.heappop(free))
        total += begins - now
        heapq.heappush(free, begins + service)
    return total / len(service_s)


@pytest.mark.parametrize(("cv", "tolerance"), [(1.0, 0.15), (0.0, 0.25)])
def test_the_mean_wait_matches_a_simulated_queue(cv: float, tolerance: float) -> None:
    """Closely for M/M/c, roughly for equal lengths."""
    load = ExpectedLoad(peak_rps=9.0, prompt=Lengths(1e-9, 0.0), completion=Lengths(100.0, cv))
    replica = ReplicaProfile(prefill_tokens_per_s=4000.0, decode=(ThroughputPoint(4, 1000.0),))
    found = plan(load, replica, PlanTargets(utilisation=0.95, spare_replicas=0))
    servers, service = found.replicas * found.slots, found.slots * found.request_s
    chance = random.Random(3)
    services = [chance.expovariate(1 / service) if cv else service for _ in range(100_000)]
    assert found.wait_mean_s == pytest.approx(simulated_wait(servers, 9.0, services, chance), rel=tolerance)


def test_rates_are_interpolated_and_never_extrapolated() -> None:
    points = (ThroughputPoint(8, 500.0), ThroughputPoint(1, 100.0))
    assert decode_tokens_per_s(points, 1) == 100.0
    assert decode_tokens_per_s(points, 8) == 500.0
    assert decode_tokens_per_s(points, 4) == pytest.approx(100 + 400 * 3 / 7)
    assert decode_tokens_per_s(points, 64) == 500.0
    assert decode_tokens_per_s((ThroughputPoint(4, 7.0),), 1) == 7.0


def test_measured_lengths_give_mean_and_spread() -> None:
    assert lengths_of([100, 300]) == Lengths(200.0, 0.5)
    with pytest.raises(ConfigError):
        lengths_of([])


@pytest.mark.parametrize(
    ("load", "replica", "aims"),
    [
        ({"peak_rps": 0.0}, {}, {}),
        ({"peak_rps": math.nan}, {}, {}),
        ({"prompt": Lengths(-1.0)}, {}, {}),
        ({"completion": Lengths(1.0, -1.0)}, {}, {}),
        ({}, {"prefill_tokens_per_s": 0.0}, {}),
        ({}, {"decode": ()}, {}),
        ({}, {"decode": (ThroughputPoint(1, 0.0),)}, {}),
        ({}, {"decode": (ThroughputPoint(0, 1.0),)}, {}),
        ({}, {"slots": -1}, {}),
        ({}, {"usd_per_hour": -1.0}, {}),
        ({}, {"overhead_s": -1.0}, {}),
        ({}, {}, {"utilisation": 1.0}),
        ({}, {}, {"utilisation": 0.0}),
        ({}, {}, {"zones": 0}),
        ({}, {}, {"spare_replicas": -1}),
    ],
)
def test_invalid_numbers_are_config_errors(
    load: dict[str, object], replica: dict[str, object], aims: dict[str, object]
) -> None:
    with pytest.raises(ConfigError):
        plan(
            msgspec.structs.replace(LOAD, **load),
            msgspec.structs.replace(REPLICA, **replica),
            msgspec.structs.replace(PlanTargets(), **aims),
        )


def run_plan(*args: str | Path) -> Result:
    return CliRunner().invoke(plan_command, [str(arg) for arg in args], env={"COLUMNS": "120"})


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("300\n500\n")
    measured = ("--prefill", "4000", "--decode", "8=500", "--usd-per-hour", "2")
    args = ("--peak-rps", "10", "--prompt", lengths, "--completion", "100:0.5", "--zones", "2", *measured)
    table = run_plan(*args)
    assert table.exit_code == 0, table.output
    assert "10, 5 in each of 2 zones (5 without redundancy)" in table.output
    assert "20.00 USD/h" in table.output
    document = json.loads(run_plan(*args, "--format", "json").output)
    assert document["plan"]["replicas"] == 10
    assert document["measured"]["decode"] == [{"sequences": 8, "tokens_per_s": 500.0}]


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--prompt", "x"),
        ("--prefill", "4000"),
        ("--prefill", "4000", "--decode", "8"),
        ("--prefill", "0", "--decode", "8=1"),
        ("--prefill", "4000", "--decode", "8=500", "--utilisation", "2"),
        ("--measure", "http://127.0.0.1:1/v1"),
    ],
)
def test_command_errors_exit_with_status_2(args: tuple[str, ...]) -> None:
    result = run_plan("--peak-rps", "10", "--prompt", "400", "--completion", "100", *args)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


class Fake:
    """An endpoint with a clock of its own: a request takes 50 ms, a prompt token 1 ms, an answer token 10 ms, in
    turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.token_s = 0.01
        self.status = 200

    async def answer(self, http: web.Request) -> web.Response:
        body = await http.json()
        prompt = len(body["messages"][0]["content"].split())
        assert body["ignore_eos"]
        self.now += 0.05 + prompt * 0.001 + body["max_tokens"] * self.token_s
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        return web.json_response({"usage": usage}, status=self.status)


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[Fake, MeasuredEndpoint]]:
    fake = Fake()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield fake, MeasuredEndpoint(session, str(server.make_url("/v1")), "m", clock=lambda: fake.now)


async def test_measured_rates_match_the_endpoint(endpoint: tuple[Fake, MeasuredEndpoint]) -> None:
    measured = await measure(endpoint[1], (1, 4))
    assert measured.prefill_tokens_per_s == pytest.approx(1000.0)
    assert measured.overhead_s == pytest.approx(0.05)
    assert [point.sequences for point in measured.decode] == [1, 4]
    for point in measured.decode:
        assert point.tokens_per_s == pytest.approx(100.0)


async def test_times_that_do_not_grow_are_an_error(endpoint: tuple[Fake, MeasuredEndpoint]) -> None:
    endpoint[0].token_s = 0.0
    with pytest.raises(ConfigError, match="did not take more time"):
        await measure(endpoint[1], (1,))


async def test_a_refusing_endpoint_is_named(endpoint: tuple[Fake, MeasuredEndpoint]) -> None:
    endpoint[0].status = 429
    with pytest.raises(ConfigError, match="429"):
        await measure(endpoint[1], (1,))
