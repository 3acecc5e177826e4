"""The generator counts right answers only, and a ratio to what cannot be measured does not hold."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from .__main__ import DIRECT, Measured, Round, judge, line
from .load import Figures, Plan, Scenario, measure
from .programs import HERE, write_answer

TOKENS = 3


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """Figures of the upstream without a server before it."""
    folder = tmp_path_factory.mktemp("upstream")
    program, answer = folder / "upstream", folder / "answer.json"
    subprocess.run(["cc", "-O2", "-o", program, HERE / "upstream.c"], check=True)
    write_answer(answer)
    with subprocess.Popen([program, answer, str(TOKENS), "100"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        core = min(os.sched_getaffinity(0))
        yield Plan(int(process.stdout.readline()), "mock", TOKENS, process.pid, process.pid, core, ())
        process.terminate()


@pytest.mark.parametrize("kind", ["pass", "stream", "hit"])
async def test_each_request_is_measured(plan: Plan, kind: str) -> None:
    figures = await measure(plan, Scenario(kind, kind, 4, 0.05))
    assert figures.requests > 0
    assert figures.p50_ms > 0
    assert figures.cpu_us > 0
    assert (figures.first_ms > 0) is (kind == "stream")


async def test_a_stream_without_a_token_ends_the_run(plan: Plan) -> None:
    with pytest.raises(RuntimeError, match="a reply 200 with 3 tokens"):
        await measure(msgspec.structs.replace(plan, tokens=TOKENS + 1), Scenario("streams", "stream", 1, 0.05))


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "a reply 200"),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "a reply 503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "closed the connection"),
        (b"220 mail.example\r\n", "HttpParser"),
    ],
)
async def test_another_answer_ends_the_run(plan: Plan, answer: bytes, fault: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RuntimeError, match=fault):
            await measure(msgspec.structs.replace(plan, port=port), Scenario("one", "pass", 1, 0.05))


def _round(ours_us: float, envoy_first_ms: float) -> Round:
    def measured(cpu_us: float, first_ms: float) -> Measured:
        figures = Figures(1000, 1000.0, 2.0, first_ms, cpu_us, 0.5, 0.5)
        return Measured(dict.fromkeys(("one", "many", "streams", "hits"), figures), 0.4, 60.0, 50.0)

    return {"ours": measured(ours_us, 3.0), "envoy": measured(50.0, envoy_first_ms), DIRECT: measured(0.0, 1.0)}


def test_ratios_are_medians_of_the_rounds() -> None:
    rows = {row.name: row for row in judge(["ours", "envoy"], [_round(us, 2.0) for us in (90.0, 500.0, 95.0)])}
    row = rows["CPU time per forwarded request, 32 in flight: our edge ÷ Envoy 1.40.0"]
    assert (row.value, row.holds) == (1.9, True)
    assert rows["time added to the first token of 32 streams: our edge ÷ Envoy 1.40.0"].value == 2.0
    assert not [name for name in rows if "vllm-router" in name]


def test_a_ratio_to_less_than_nothing_misses() -> None:
    rows = {row.name: row for row in judge(["ours", "envoy"], [_round(90.0, 0.5)])}
    assert rows["time added to the first token of 32 streams: our edge ÷ Envoy 1.40.0"].holds is False


def test_a_full_core_is_named_and_times_have_no_verdict() -> None:
    one = _round(90.0, 2.0)
    full = msgspec.structs.replace(one["ours"].figures["many"], busy=0.96)
    one["ours"] = msgspec.structs.replace(one["ours"], figures={**one["ours"].figures, "many": full})
    assert line("ours", [one])[-1] == "0.96, 0.50 (full)"
    assert line("envoy", [one])[-1] == "0.50, 0.50"
    rows = {row.name: row for row in judge(["ours", "envoy"], [one])}
    assert rows["median time added to a forwarded request, 1 in flight: our edge ÷ Envoy 1.40.0"].holds is None
    assert rows["CPU time per forwarded request, 32 in flight: our edge ÷ Envoy 1.40.0"].holds is True
