"""The egress ledgers of a real device and a real gateway, and what an audit of their folders says."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.edge_node.scripted import ScriptedCloud
from tests.ports import free_port
from tests.stack import Process
from tests.waiting import until

CHAT = {"model": "large", "messages": [{"role": "user", "content": "what is in shelf 7"}]}
POLICY = """
version: 1
name: ledger
targets: {large: {at: cloud, model: assistant, can: [chat, completion, embedding, tools, json, logprobs]}}
constraints: [{name: private-stays, keep: on_device, when: '"private" in request.tags'}]
routes: [{name: all, use: [large]}]
"""


class Pair:
    """A gateway and a device, as processes with their state folders below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.urls: dict[str, str] = {}
        self.processes: dict[str, Process] = {}

    def start(self) -> None:
        for name, module in (("gateway", "cloud_pool"), ("device", "edge_node")):
            program = [sys.executable, "-m", f"causeway_server.{module}", "serve", "--config"]
            process = Process(name, [*program, str(self.folder / f"{name}.yaml")], self.folder / f"{name}.log")
            self.processes[name] = process
            self.urls[name] = process.ready()["url"]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    def stop(self) -> None:
        for process in self.processes.values():
            process.popen.terminate()
            process.popen.wait()

    async def ask(self, path: str, body: object, headers: dict[str, str] | None = None, at: str = "device") -> int:
        url = self.urls[at].removesuffix("/v1")
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}{path}", json=body, headers=headers) as answer,
        ):
            await answer.read()
            return answer.status

    def audit(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Audit copies of both folders, as an auditor far from them."""
        copies = self.folder / "copies"
        shutil.rmtree(copies, ignore_errors=True)
        for name in ("device", "gateway"):
            shutil.copytree(self.folder / name / "egress", copies / name)
        return audit(self.folder, copies / "device", copies / "gateway", *more)


def audit(folder: Path, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "causeway_server.fleet", "audit", "egress", "--heads", str(folder / "heads.json")]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("   ")]
    return {name: int(number) for number, name in rows}


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    cloud = await ScriptedCloud().start()
    (folder / "policy.yaml").write_text(POLICY)
    ledger = {"enabled": True, "commit_s": 0.2}
    tier = {
        "name": "assistant",
        "can": ["chat", "completion", "embedding"],
        "upstream": {"kind": "openai", "urls": [f"{cloud.url}"], "verify_features": False},
    }
    port = free_port()
    gateway = {
        "server": {"port": port},
        "operator": {"port": 0},
        "state_dir": str(folder / "gateway"),
        "tiers": [tier],
        "egress_ledger": ledger,
    }
    device = {
        "policy": str(folder / "policy.yaml"),
        "server": {"port": 0},
        "state_dir": str(folder / "device"),
        "engine": {"enabled": False},
        "clouds": {"main": {"url": f"http://127.0.0.1:{port}/v1", "region": "eu-central"}},
        "jobs": {"jitter_s": 0},
        "egress_ledger": ledger,
    }
    for name, document in (("gateway", gateway), ("device", device)):
        (folder / f"{name}.yaml").write_text(json.dumps(document))
    made = Pair(folder)
    try:
        made.start()
        yield made
    finally:
        made.kill()
        await cloud.stop()


@pytest.mark.slow
async def test_what_left_the_device_is_what_arrived(tmp_path: Path) -> None:
    """Whole answers, a stream, vectors and a refused private request; then a kill of both, and a clean end."""
    async with pair(tmp_path) as made:
        for _ in range(5):
            assert await made.ask("/v1/chat/completions", CHAT) == 200
        assert await made.ask("/v1/chat/completions", CHAT | {"stream": True}) == 200
        assert await made.ask("/v1/embeddings", {"model": "large", "input": "shelf 7"}) == 200
        assert await made.ask("/v1/chat/completions", CHAT, {"x-causeway-tags": "private"}) >= 400
        assert await made.ask("/v1/chat/completions", {**CHAT, "model": "assistant"}, at="gateway") == 200
        await until(lambda: counts(made.audit()).get("matched") == 7)
        assert await made.ask("/v1/chat/completions", CHAT) == 200
        made.kill()
        made.start()
        assert await made.ask("/v1/chat/completions", CHAT) == 200
        made.stop()
        done = made.audit()
        assert done.returncode == 0, done.stdout
        found = counts(done)
        assert 8 <= found["matched"] <= found["matched"] + found["undecided"] + found["unconfirmed"] <= 9, done.stdout
        assert (found["tampered"], found["private"], found["unlogged"]) == (0, 0, 0)
