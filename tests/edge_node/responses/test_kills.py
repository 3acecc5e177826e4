"""kill -9 amid a chain, and amid a response in the background: what was acknowledged is there, once and whole."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import ResponsesConfig
from causeway_server.edge_node.storage.responses import DeviceResponseStore

from .support import KEYS
from .test_background import ended, up_to

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
ANSWER = "edge says so"
TALK = f"conv_{'0' * 24}"
PROGRAM = """
import asyncio, sys
from pathlib import Path
from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import ResponsesConfig
from causeway_server.edge_node.storage.responses import DeviceResponseStore

async def main() -> None:
    store = DeviceResponseStore(Path(sys.argv[1]), ResponsesConfig(), system_clock())
    first = int(sys.argv[2])
    for at in range(first, first + 100_000):
        name = f"resp_{'0' * 24}{at:024x}"
        await store.put("kiosk", name, f"turn {at} {'x' * 500}".encode(), private=False, user="")
        print(at, flush=True)

asyncio.run(main())
"""


async def stored(folder: Path) -> list[str]:
    store = DeviceResponseStore(folder, ResponsesConfig(), system_clock())
    turns = [data.decode() for data in await store.read_group("kiosk", TALK)]
    store.close()
    return turns


def test_a_killed_daemon_loses_no_turn_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    for wanted in (1, 7, 20):
        first = len(acknowledged)
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            acknowledged += [int(daemon.stdout.readline()) for _ in range(wanted)]
            daemon.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in daemon.stdout.read().splitlines()]
        turns = asyncio.run(stored(tmp_path))
        expected = [f"turn {at} {'x' * 500}" for at in acknowledged]
        assert turns[: len(expected)] == expected
        assert len(turns) - len(expected) <= 1  # the one that was committed and not acknowledged any more
        acknowledged = list(range(len(turns)))


@asynccontextmanager
async def killed_daemon(folder: Path, words: int) -> AsyncIterator[openai.AsyncOpenAI]:
    """A daemon as a process, which is killed at the end of the block."""
    program = (sys.executable, "-m", "tests.edge_node.responses.daemon_process", str(folder), str(words))
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    try:
        port = int(await asyncio.wait_for(process.stdout.readline(), 60))
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEYS[0], max_retries=0, timeout=30) as client:
            yield client
            process.kill()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_daemon_that_is_killed_loses_nothing_and_does_nothing_twice(tmp_path: Path) -> None:
    """Killed after a chain, in the middle of its next turn, and in the middle of a response in the background."""
    async with killed_daemon(tmp_path, -1) as client:
        first = await client.responses.create(model="small", input="one", store=True)
        second = await client.responses.create(model="small", input="two", store=True, previous_response_id=first.id)
        unread = await client.responses.create(model="small", input="three", background=True)
    async with killed_daemon(tmp_path, 2) as client:
        assert (await client.responses.retrieve(second.id)).to_dict() == second.to_dict()
        turn = await client.responses.create(
            model="small", input="x", store=True, previous_response_id=second.id, stream=True
        )
        begun = await up_to(turn, "says ", close=False)
        stream = await client.responses.create(model="small", input="four", background=True, stream=True)
        events = await up_to(stream, "says ", close=False)
    name, number = str(events[0]["response"]["id"]), events[-1]["sequence_number"]
    async with killed_daemon(tmp_path, -1) as client:
        for made in (first, second):
            assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
        with pytest.raises(openai.NotFoundError):  # its client never had its end
            await client.responses.retrieve(str(begun[0]["response"]["id"]))
        assert (await ended(client, unread.id)).output_text == ANSWER
        resumed = await client.responses.retrieve(name, stream=True, starting_after=number)
        events += [event.to_dict() async for event in resumed]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event.get("delta", "") for event in events) == ANSWER
        assert events[-1]["response"] == (await client.responses.retrieve(name)).to_dict()
        third = await client.responses.create(model="small", input="five", store=True, previous_response_id=second.id)
        items: list[Any] = [item.to_dict() async for item in client.responses.input_items.list(third.id, order="asc")]
        assert [item["content"][0]["text"] for item in items] == ["one", ANSWER, "two", ANSWER, "five"]
        jobs: Any = await client.get("/jobs", cast_to=object)
        assert [job["status"] for job in jobs["data"]] == ["succeeded"] * 2
