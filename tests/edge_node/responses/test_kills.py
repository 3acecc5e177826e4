"""kill -9 in the middle of a chain: each turn that was acknowledged is there, once and whole."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import ResponsesConfig
from causeway_server.edge_node.storage.responses import DeviceResponseStore

pytestmark = pytest.mark.slow
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
