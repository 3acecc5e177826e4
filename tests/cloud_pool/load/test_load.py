"""`causeway-cloud load` against servers on real sockets: a device, and one that fails."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from causeway_server.cloud_pool.load.client import Sample
from causeway_server.cloud_pool.load.report import Percentiles, percentiles, summarize, write_page
from causeway_server.cloud_pool.load.traces import Conversation, arrivals, made, read_trace, schedule
from causeway_server.router.errors import ConfigError
from tests.edge_node.device import running

CHAT = '{"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
STREAM = (
    'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "ye"}}]}\n\ndata: {"choices": [{"delta": {"content": "s"}}]}\n\n'
    'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


class Server:
    """Answers with a text of the test, and keeps the bodies that it got."""

    def __init__(self, answer: str, status: int) -> None:
        self.bodies: list[dict[str, object]] = []
        self.url = ""
        self._answer = answer
        self._status = status

    async def chat(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        kind = "text/event-stream" if self._answer.startswith("data:") else "application/json"
        return web.Response(text=self._answer, status=self._status, content_type=kind)


@asynccontextmanager
async def serving(answer: str, status: int = 200) -> AsyncIterator[Server]:
    server = Server(answer, status)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


async def load(url: str, *options: str) -> tuple[int, dict[str, object]]:
    """Run the command; return its exit code and its figures."""
    command = (sys.executable, "-m", "causeway_server.cloud_pool", "load", url, "--format", "json", *options)
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await program.communicate()
    return program.returncode or 0, json.loads(printed or "{}")


def trace_of(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.slow
async def test_a_trace_of_conversations_is_asked_in_order_with_the_answers_before(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {"turns": ["a", "b"], "at_s": 0.0}, {"turns": ["later"], "at_s": 1000.0})
    report = tmp_path / "report.html"
    async with serving(STREAM) as server:
        status, figures = await load(server.url, "--trace", trace, "--report", str(report))
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "b"}],
    ]
    assert (status, figures["requests"], figures["input_tokens"], figures["output_tokens"]) == (0, 2, 6, 4)
    page = report.read_text(encoding="utf-8")
    assert page.count("<circle") == 4
    assert "http" not in page.replace(server.url, "")


@pytest.mark.slow
async def test_users_ask_a_real_device_until_the_time_is_over(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        url = f"http://127.0.0.1:{device.app.port}/v1"
        status, figures = await load(url, "--users", "2", "--duration-s", "0.5", "--no-stream")
    assert status == 0
    assert figures["faults"] == {}
    assert set(figures["routes"]) == {"edge"}  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "status", "fault"),
    [
        (CHAT, 503, "503"),
        ("data: {}\n\n", 200, "cut stream"),
        ('data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n', 200, "error event"),
        ("[]", 200, "not OpenAI's format"),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure(tmp_path: Path, answer: str, status: int, fault: str) -> None:
    """It ends its conversation, has no part in the percentiles, and makes the exit code 1."""
    trace = trace_of(tmp_path, {"turns": ["a", "b"], "at_s": 0.0})
    async with serving(answer, status) as server:
        code, figures = await load(server.url, "--trace", trace)
    assert (code, figures["requests"], figures["faults"], figures["total"]) == (1, 1, {fault: 1}, None)


async def test_nothing_that_listens_is_a_failure(tmp_path: Path) -> None:
    code, figures = await load("http://127.0.0.1:9/v1", "--trace", trace_of(tmp_path, {"turns": ["a"], "at_s": 0.0}))
    assert (code, figures["faults"]) == (1, {"ClientConnectorError": 1})


@pytest.mark.parametrize("options", [(), ("--users", "1", "--rate", "1")])
async def test_one_loop_has_to_be_chosen(options: tuple[str, ...]) -> None:
    assert (await load("http://127.0.0.1:9/v1", *options))[0] == 2


@pytest.mark.parametrize("url", ["127.0.0.1:8100/v1", "http://", "http://127.0.0.1:99999/v1"])
async def test_an_address_that_names_no_server_is_a_usage_error(url: str) -> None:
    assert (await load(url, "--users", "1"))[0] == 2


def test_a_request_that_was_sent_late_counts_from_when_it_was_due() -> None:
    """Behind a stall of the server or of this client: no coordinated omission."""
    late = Sample(1.0, sent_s=5.0, first_s=5.5, ended_s=6.0, output_tokens=2)
    found = summarize([late])
    assert (found.first_token, found.total) == (Percentiles(4.5, 4.5, 4.5, 4.5), Percentiles(5.0, 5.0, 5.0, 5.0))
    assert found.sent_late == Percentiles(4.0, 4.0, 4.0, 4.0)
    assert found.between_tokens == Percentiles(0.5, 0.5, 0.5, 0.5)


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles([float(value) for value in range(1, 201)]) == Percentiles(100.0, 180.0, 198.0, 200.0)
    assert percentiles([]) is None


def test_a_page_without_an_answer_is_written(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", "a & b", {"url": "<u>"}, [Sample(0.0, fault="503")])
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "a &amp; b" in page
    assert "1 × 503" in page
    assert "<u>" not in page


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ('{"turns": []}\n', "trace.jsonl:1: `turns` is empty"),
        ('{"turns": ["a"]}\n{"turn": []}\n', "trace.jsonl:2: .*unknown field `turn`"),
        ('{"turns": ["a"]}\n{"turns": ["b"], "at_s": 1}\n', "`at_s` in every line, or in none"),
        ("", "`at_s` in every line, or in none"),
    ],
)
def test_a_bad_trace_is_refused_by_its_line(tmp_path: Path, lines: str, fault: str) -> None:
    (tmp_path / "trace.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=fault):
        read_trace(tmp_path / "trace.jsonl")


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_times_of_arrivals_are_within_the_load_and_as_many_as_asked_for() -> None:
    found = list(arrivals(random.Random(1), 50.0, 100.0))
    assert found == sorted(found)
    assert found[0] > 0
    assert found[-1] < 100.0
    assert 4700 < len(found) < 5300
    late = Conversation(("a",), at_s=9.0)
    assert schedule([late, Conversation(("b",), at_s=2.0), Conversation(("c",), at_s=99.0)], 10.0) == [
        (2.0, Conversation(("b",), at_s=2.0)),
        (9.0, late),
    ]


def test_conversations_that_are_made_differ_and_are_the_same_with_the_same_seed() -> None:
    first, second = random.Random(1), random.Random(1)
    made_now = [made(first, 2, 5, 0.5) for _ in range(3)]
    assert made_now == [made(second, 2, 5, 0.5) for _ in range(3)]
    assert len({one.turns for one in made_now}) == 3
    assert [len(turn.split()) for turn in made_now[0].turns] == [5, 5]
