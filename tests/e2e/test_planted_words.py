"""1,000 planted words: none is in any byte that a daemon ever writes into its state folder, or in a name of a file.

The folder that a power cut leaves consists of writes, whole or in part, that the daemon made before (`power_cuts`): so
each write is searched, beside the folder as it is under load, after a kill and after a clean end. The model that ships
reads no system prompts, so KV states are searched in `tests/models/llama_cpp/test_prompt_store.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from paho.mqtt import publish

from causeway_server.router.serving.at_rest.sealing import MAGIC
from tests.edge_node.jobs import power_cuts
from tests.edge_node.scripted import ScriptedCloud
from tests.mosquitto import Mosquitto, mosquitto
from tests.stack import Stack

__all__ = ["mosquitto"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"),
]
COUNT = 1000
WORD = re.compile(rb"zyqx[0-9]{4}w")


class Words:
    """The words, each of which is planted once. `clients`: the names of API keys, which are the keys, too."""

    def __init__(self) -> None:
        self._left = iter(range(COUNT))
        self.clients = [self.take() for _ in range(10)]

    def take(self, count: int = 1) -> str:
        return " ".join(f"zyqx{next(self._left):04}w" for _ in range(count))

    @property
    def left(self) -> int:
        return sum(1 for _ in self._left)


def found(*places: Path) -> set[str]:
    """The words in the bytes and the names of files."""
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    assert files
    hits: set[bytes] = set()
    for file in files:
        hits |= {*WORD.findall(file.read_bytes()), *WORD.findall(os.fsencode(file))}
    return {hit.decode() for hit in hits}


def writes(folder: Path) -> list[Path]:
    """The records of the shim, one for each process."""
    return [*folder.glob("writes.*")]


def sealed_values(folder: Path) -> int:
    return sum(one.read_bytes().count(MAGIC) for one in writes(folder))


class Load:
    """Requests through each door, with planted words wherever a client may put one."""

    def __init__(self, http: aiohttp.ClientSession, url: str, cloud: ScriptedCloud, broker: Mosquitto) -> None:
        self._http = http
        self._url = url
        self._cloud = cloud
        self._broker = broker
        self.words = Words()

    async def call(self, path: str, client: int = 0, headers: dict[str, str] | None = None, **content: Any) -> Any:
        sent = {"Authorization": f"Bearer {self.words.clients[client % 10]}", **(headers or {})}
        async with self._http.post(self._url + path, headers=sent, **content) as response:
            body = await response.read()
            assert response.status in (200, 202), body
            return body

    async def has_messages(self) -> None:
        """Wait until the daemon has taken messages of the broker."""
        taken = re.compile(r'causeway_edge_mqtt_messages_total{result="accepted"} [1-9]')
        async with asyncio.timeout(60):
            while True:
                async with self._http.get(f"{self._url}/metrics") as response:
                    if taken.search(await response.text()):
                        return
                await asyncio.sleep(0.05)

    def chat(self, words: int, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.words.take(words)}]
        return {"model": "auto", "messages": messages, "max_tokens": 3, "user": self.words.take(), **fields}

    async def round(self, turn: int) -> None:
        """Plant 50 words."""
        take = self.words.take
        self._cloud.words = (take(), f" {take()}", ".")
        device, cloud = ({"x-causeway-prefer": f"only_{place}"} for place in ("on_device", "cloud"))
        path = "/v1/chat/completions"
        await self.call(path, turn, cloud | {"x-session-id": take()}, json=self.chat(5, temperature=0))
        await self.call(path, turn, cloud, json=self.chat(4, stream=True))
        system = {"role": "system", "content": take(8)}
        for _ in range(2):
            asked = self.chat(2)
            await self.call(path, turn, device, json=asked | {"messages": [system, *asked["messages"]]})
        for headers in ({"Idempotency-Key": take()}, {}):
            await self.call("/v1/jobs", turn, headers, json=self.chat(2))
        await self.call("/v1/jobs", turn, json=self.chat(2, not_before_ms=3_600_000))
        form = aiohttp.FormData({"purpose": "user_data"})
        form.add_field("file", take(2).encode() * 100, filename=f"{take()}.txt")
        file = msgspec.json.decode(await self.call("/v1/files", turn, data=form))
        part = {"type": "file", "file": {"file_id": file["id"]}}
        await self.call("/v1/jobs", turn, json=self.chat(1) | {"messages": [{"role": "user", "content": [part]}]})
        await self.call("/v1/responses", turn, json={"model": "auto", "input": take(2), "store": True})
        topic, payload = f"plant/{take()}/ask", msgspec.json.encode(self.chat(1))
        await asyncio.to_thread(publish.single, topic, payload, 1, hostname="127.0.0.1", port=self._broker.port)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "disk_shim.so"
    source = Path(power_cuts.__file__).with_name("disk_shim.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


async def test_no_planted_word_is_ever_written(tmp_path: Path, shim: Path, mosquitto: Mosquitto) -> None:
    stack, state, log = Stack(tmp_path / "device"), tmp_path / "device" / "state", tmp_path / "writes"
    mosquitto.start()
    cloud = await ScriptedCloud().start()
    env = {"LD_PRELOAD": str(shim), "SHIM_FOLDER": str(state), "SHIM_LOG": str(log)}
    async with aiohttp.ClientSession() as http:
        load = Load(http, stack.edge_url, cloud, mosquitto)
        keys = [f"{{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}}}" for name in load.words.clients]
        topics = '[{filter: "plant/+/ask", answer_topic: "{topic}/answer"}]'
        config = f"mqtt: {{url: 'mqtt://127.0.0.1:{mosquitto.port}', topics: {topics}}}\n"
        config += "files: {accept: true}\njobs: {accept_parts: true}\n"

        def start() -> None:
            edge = stack.start_edge(config, server=f"keys: [{', '.join(keys)}]", cloud_port=cloud.port, env=env)
            edge.ready()
            stack.wait_until_loaded()

        try:
            await asyncio.to_thread(start)
            for turn in range(10):
                await load.round(turn)
            await load.has_messages()
            assert found(state) == set(), "under load"
            stack.parts["edge"].kill()
            assert found(state) == set(), "after a kill"
            await asyncio.to_thread(start)
            for turn in range(10):
                await load.round(turn)
            await asyncio.to_thread(stack.parts["edge"].stop)
            assert found(state) == set(), "after a clean end"
            assert load.words.left < 50
        finally:
            stack.parts["edge"].kill()
            await cloud.stop()
    assert sealed_values(tmp_path) > 100
    assert found(*writes(tmp_path)) == set(), "in a write"
