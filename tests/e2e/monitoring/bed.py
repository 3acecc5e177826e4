"""A device with sensors, a gateway, a control plane and a Prometheus that scrapes them, all real.

The gateway's tier `large` has the device itself as its server, `narrow` takes one request at a time, and nothing is
behind `lost`. The device's sensors are files with the layout of a Jetson's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.edge_node.cli import devices
from tests.fleet.operators.conftest import Server, operated_fleet, serving
from tests.fleet.operators.test_http import newest
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.stack import BIN, TOKEN, Process, Stack

from .files import RULES, prometheus

POLICY = """version: 1
name: kiosk
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: large, price: {input: 70, output: 70}}
  lost: {at: cloud, model: lost}
routes:
  - {name: handoff, when: '"handoff" in request.tags', use: [small, large], handoff: {after_tokens: 1, below: 1.0}}
  - {name: fallback, when: '"fallback" in request.tags', use: [lost, small]}
  - {name: failure, when: '"failure" in request.tags', use: [lost]}
  - {name: cloud, when: '"cloud" in request.tags', use: [large]}
  - {name: device, use: [small]}
cache:
  - {when: request.temperature == 0.0, exact: {ttl: 60s}}
"""
# The daemon, with another root of the sensors' files.
EDGE = """
import pathlib, runpy
from causeway_server.edge_node.signals.device import DeviceProbes
DeviceProbes.__init__.__defaults__ = (pathlib.Path({root!r}),)
runpy.run_module("causeway_server.edge_node", run_name="__main__", alter_sys=True)
"""
_PATIENCE = aiohttp.ClientTimeout(30.0)
BATTERY = {f"sys/class/power_supply/BAT0/{name}": value for name, value in (("type", "Battery"), ("capacity", "80"))}


class Bed:
    """The running programs. `round`: one round of requests of every kind that a panel shows."""

    def __init__(self, stack: Stack, server: Server, port: int) -> None:
        self.stack = stack
        self._server = server
        self._prometheus = f"http://127.0.0.1:{port}"
        self._http = server.http

    async def round(self) -> None:
        edge, gateway = self.stack.edge_url, self.stack.gateway_url
        for tags in ("", "handoff", "fallback", "failure", "cloud"):
            await self._ask(edge, "auto", {"x-causeway-tags": tags} if tags else {})
        for model in ("large", "large", "lost"):
            await self._ask(gateway, model)
        await asyncio.gather(*(self._ask(gateway, "narrow", {"cache-control": "no-store"}) for _ in range(4)))
        await self.post(f"{gateway}/v1/chat/completions", {"model": "large"})
        await self.post(f"{edge}/v1/chat/completions", {"model": "auto"})

    async def answers(self, path: str, **query: str) -> Any:
        """Return the data of an answer of Prometheus."""
        async with self._http.get(f"{self._prometheus}/api/v1/{path}", params=query) as response:
            body = await response.json()
            assert body["status"] == "success", body
            return body["data"]

    async def _ask(self, url: str, model: str, headers: Mapping[str, str] = {}) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        body["temperature"] = 0.0 if not headers else 0.5
        await self.post(f"{url}/v1/chat/completions", body, headers)

    async def post(self, url: str, body: object, headers: Mapping[str, str] = {}) -> None:
        sent = {"authorization": f"Bearer {TOKEN}", **headers}
        async with self._http.post(url, json=body, headers=sent, timeout=_PATIENCE) as answer:
            await answer.read()


@asynccontextmanager
async def running(folder: Path, redis: RedisServer) -> AsyncIterator[Bed]:
    """Run all of it, with a job that waits and a rollout of which the device is a member."""
    async with AsyncExitStack() as exits:
        server = await exits.enter_async_context(serving(operated_fleet(folder)))
        stack = Stack(folder)
        exits.callback(_kill, stack)
        operator = await asyncio.to_thread(_start, stack, server.url, await _join_token(server), redis)
        port = free_port()
        exits.callback(_start_prometheus(stack, operator, server.url, port).kill)
        await server.post("/v1/rollouts", {"cohort": "kiosk", "to_bundle": newest(server)})
        bed = Bed(stack, server, port)
        for url, model in ((stack.gateway_url, "large"), (stack.edge_url, "small")):
            await bed.post(f"{url}/v1/jobs", {"model": model, **_JOB}, {"idempotency-key": "later"})
        while True:
            with suppress(aiohttp.ClientError):
                await bed.answers("query", query="up")
                break
        yield bed


_JOB = {"messages": [{"role": "user", "content": "later"}], "max_tokens": 4}


async def _join_token(server: Server) -> str:
    return str((await server.post("/v1/join-tokens", {"cohort": "kiosk", "uses": 1}))["token"])


def _start(stack: Stack, plane: str, join_token: str, redis: RedisServer) -> str:
    """Start gateway and device, which joins the fleet. Return the URL of the gateway's metrics."""
    folder = stack.folder
    join = [str(BIN / "causeway-edge"), "fleet", "join", plane, "--name", "kiosk-1", "--label", "role=kiosk"]
    join += ["--state-dir", str(folder / "state")]
    subprocess.run(join, input=join_token, text=True, check=True, capture_output=True)
    (folder / "edge.key").write_text(f"{TOKEN}\n")
    upstream = {"kind": "openai", "urls": [f"{stack.edge_url}/v1"], "key_file": "edge.key", "verify_features": False}
    served = {"model": "small", "context_tokens": 2048, "upstream": upstream}
    lost = {
        **served,
        "upstream": {
            "kind": "openai",
            "urls": [f"http://127.0.0.1:{free_port()}/v1" for _ in range(2)],
            "verify_features": False,
        },
    }
    config = {
        "redis": redis.url,
        "cache": {"enabled": True},
        "tenants": {"prices": [{"tier": "large", "input": 20, "output": 70}]},
        "tiers": [
            {"name": "large", **served},
            {"name": "narrow", "concurrency": 1, "max_queued": 1, **served},
            {"name": "lost", **lost},
        ],
    }
    ready = stack.start_gateway(config=json.dumps(config), addressed=True).ready()
    sensors = devices.plant(folder / "sensors", devices.orin_nano(), BATTERY)
    (folder / "policy.yaml").write_text(POLICY)
    edge = {
        "state_dir": str(folder / "state"),
        "policy": str(folder / "policy.yaml"),
        "server": {
            "port": stack.edge_port,
            "keys": [{"name": "tests", "sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}],
        },
        "clouds": {"main": {"url": f"{stack.gateway_url}/v1", "key": TOKEN}},
        "cloud": {"probe_interval_s": 0.5},
    }
    (folder / "edge.yaml").write_text(json.dumps(edge))
    command = [sys.executable, "-c", EDGE.format(root=str(sensors)), "serve", "--config", str(folder / "edge.yaml")]
    stack.parts["edge"] = Process("edge", command, folder / "edge.log")
    stack.parts["edge"].ready()
    return ready["operator"]


def _start_prometheus(stack: Stack, operator: str, plane: str, port: int) -> subprocess.Popen[bytes]:
    config = stack.folder / "prometheus.yaml"
    config.write_text(json.dumps(_scrapes(stack, operator, plane)))
    command = [prometheus(), f"--config.file={config}", f"--storage.tsdb.path={stack.folder / 'series'}"]
    with (stack.folder / "prometheus.log").open("wb") as log:
        return subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)


def _scrapes(stack: Stack, operator: str, plane: str) -> dict[str, Any]:
    bearer = {"authorization": {"credentials": TOKEN}}
    targets = {"edge": stack.edge_url, "gateway": operator, "plane": plane}
    return {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [url.rpartition("/")[2]]}], **bearer}
            for name, url in targets.items()
        ],
    }


def _kill(stack: Stack) -> None:
    for part in stack.parts.values():
        part.kill()
