"""Control plane, gateway and edge daemon as real processes, with one identity for all."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from click.testing import CliRunner

from causeway_server.fleet.cli.commands import main as fleet_command
from causeway_server.fleet.repository.folder import new_fleet
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.enrolment import new_join_token
from causeway_server.fleet.store.generations import revoke
from tests.ports import free_port
from tests.stack import Process

ROOT = Path(__file__).parents[3]
FLEET = """version: 1
name: stores
cohorts:
  kiosk: {match: {role: kiosk}, policy: policies/default.yaml}
"""
POLICY = """version: 1
name: kiosk
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: assistant-large, timeout: 20s}
routes:
  - {name: device, when: '"device" in request.tags', use: [small]}
  - {name: cloud-first, use: [large, small]}
"""
WAIT_S = 100.0
# The daemon, whose random pauses are near their shortest: else it asks an absent control plane again after up to 60 s.
HASTY_EDGE = """
import random, runpy
random.Random.uniform = lambda self, low, high: low + 0.02 * (high - low)
runpy.run_module("causeway_server.edge_node", run_name="__main__", alter_sys=True)
"""


class Site:
    """One of each. The gateway has no Triton: what passes its identity check fails with 503."""

    def __init__(self, folder: Path, fleet: Path | None = None, *, tls: bool = False) -> None:
        """`fleet`: a fleet's folder with its keys in `keys`; by default one that has signed nothing. `tls`: control
        plane and gateway have certificates of the fleet's CA, and the gateway asks devices for theirs.
        """
        self.folder = folder
        self.tls = folder / "tls" if tls else None
        self.fleet = fleet or folder / "fleet"
        self.state_dir = folder / "device"
        self.plane_port, self.gateway_port, self.edge_port = free_port(), free_port(), free_port()
        self.plane_url = f"http{'s' * tls}://127.0.0.1:{self.plane_port}"
        trusted: dict[str, Any] = {}
        if self.tls is not None:
            assert CliRunner().invoke(fleet_command, ["tls", "init", str(self.tls), "127.0.0.1"]).exit_code == 0
            trusted = {"ca_certs": str(self.tls / "ca.pem")}
        self._http = urllib3.PoolManager(retries=False, timeout=30.0, **trusted)
        self._running: list[Process] = []
        if fleet is None:
            _write_fleet(self.fleet)
        (folder / "policy.yaml").write_text(POLICY)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_plane(self) -> Process:
        fleet, keys, data = str(self.fleet), str(self.fleet / "keys"), str(self.folder / "data")
        listen = f"127.0.0.1:{self.plane_port}"
        plane = self._start(
            "plane",
            "-m",
            "causeway_server.fleet",
            "serve",
            fleet,
            "--keys",
            keys,
            "--state-dir",
            data,
            "--listen",
            listen,
            *(() if self.tls is None else ("--tls-cert-file", f"{self.tls}/127.0.0.1.pem")),
            *(() if self.tls is None else ("--tls-key-file", f"{self.tls}/127.0.0.1.key")),
            *(() if self.tls is None else ("--device-ca", str(self.tls))),
        )
        self.until(lambda: self.get(self.plane_url + "/readyz")[0] == 200)
        return plane

    def start_gateway(self, **fleet: object) -> Process:
        config: dict[str, Any] = {
            "server": {"port": self.gateway_port},
            "operator": {"port": 0},
            "audit_file": "audit.jsonl",
            "identity": {
                "fleet": {
                    "url": self.plane_url,
                    "refresh_s": 0.5,
                    "copy_file": "fleet.json",
                    "tenants": ["acme"],
                    **fleet,
                }
            },
            "tiers": [
                {
                    "name": "assistant-large",
                    "triton": "127.0.0.1:1",
                    "template_file": str(ROOT / "tests" / "cloud_pool" / "plain.jinja"),
                    "context_tokens": 2048,
                }
            ],
        }
        if self.tls is not None:
            server: dict[str, Any] = config["server"]
            names = {"cert_file": "127.0.0.1.pem", "key_file": "127.0.0.1.key", "client_ca_file": "ca.pem"}
            server["tls"] = {key: f"{self.tls}/{name}" for key, name in names.items()}
            config["identity"]["fleet"]["ca_file"] = f"{self.tls}/ca.pem"
            config["identity"]["certificates"] = {"tenants": ["acme"]}
        path = self.folder / "gateway.yaml"
        path.write_text(json.dumps(config))
        gateway = self._start("gateway", "-m", "causeway_server.cloud_pool", "serve", "--config", str(path))
        gateway.ready()
        return gateway

    def start_edge(self) -> Process:
        cloud = {"url": f"http{'' if self.tls is None else 's'}://127.0.0.1:{self.gateway_port}/v1"}
        if self.tls is not None:
            cloud["ca_file"] = f"{self.tls}/ca.pem"
        config = {
            "state_dir": str(self.state_dir),
            "policy": str(self.folder / "policy.yaml"),
            "server": {"port": self.edge_port},
            "engine": {"sequences": 2, "threads": 1},
            "clouds": {"main": cloud},
            "cloud": {"probe_interval_s": 60.0 if self.tls is None else 1.0},  # the first one has no certificate yet
        }
        path = self.folder / "edge.yaml"
        path.write_text(json.dumps(config))
        edge = self._start("edge", "-c", HASTY_EDGE, "serve", "--config", str(path))
        edge.ready()
        return edge

    def command(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command of `causeway-edge` with the device's state folder."""
        command = [sys.executable, "-m", "causeway_server.edge_node", *arguments, "--state-dir", str(self.state_dir)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input=stdin, check=False)

    def stop(self) -> None:
        for process in reversed(self._running):
            process.kill()

    def _start(self, name: str, *arguments: str) -> Process:
        process = Process(name, [sys.executable, *arguments], self.folder / f"{name}.log")
        self._running.append(process)
        return process

    # --- the operator of the fleet -----------------------------------------------------------------------------------

    def join_token(self) -> str:
        return asyncio.run(self._join_token())

    def join(self, name: str = "kiosk-1", token: str = "") -> subprocess.CompletedProcess[str]:
        token = token or self.join_token()
        trusted = () if self.tls is None else ("--ca-file", f"{self.tls}/ca.pem")
        arguments = (self.plane_url, "--name", name, "--label", "role=kiosk", *trusted)
        return self.command("fleet", "join", *arguments, stdin=token)

    async def _join_token(self) -> str:
        store = await self._store()
        async with store.write() as connection:
            token = await new_join_token(
                connection, cohort="", tenant="acme", labels={}, uses=1, expires_s=600.0, now=time.time()
            )
        await store.close()
        return token

    def revoke(self, device: str = "kiosk-1") -> None:
        asyncio.run(self._revoke(device))

    async def _revoke(self, device: str) -> None:
        store = await self._store()
        async with store.write() as connection:
            assert await revoke(connection, device, time.time())
        await store.close()

    async def _store(self) -> Store:
        return await Store.open(f"sqlite:///{self.folder / 'data' / 'fleet.db'}")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Ask the control plane's database."""
        with sqlite3.connect(self.folder / "data" / "fleet.db") as connection:
            return connection.execute(query).fetchall()

    # --- what happened -----------------------------------------------------------------------------------------------

    def get(self, url: str) -> tuple[int, Any]:
        try:
            answer = self._http.request("GET", url)
        except urllib3.exceptions.HTTPError:
            return 0, None
        return answer.status, answer.json() if answer.data[:1] == b"{" else None

    def problems(self) -> str:
        """What the daemon's /readyz says."""
        return "\n".join(self.get(f"http://127.0.0.1:{self.edge_port}/readyz")[1]["problems"])

    def ask(self, tags: str = "") -> tuple[int, dict[str, str]]:
        """Ask the device; returns status and headers."""
        body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        url = f"http://127.0.0.1:{self.edge_port}/v1/chat/completions"
        headers = {"x-causeway-tags": tags} if tags else {}
        answer = self._http.request("POST", url, json=body, headers=headers)
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    def audited(self) -> list[dict[str, Any]]:
        path = self.folder / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.1)


def _write_fleet(folder: Path) -> None:
    new_fleet(folder)
    (folder / "fleet.yaml").write_text(FLEET)
    metadata = folder / "published" / "tuf" / "metadata"
    metadata.mkdir(parents=True)
    for name in ("1.root.json", "root.json", "timestamp.json"):
        (metadata / name).write_bytes(msgspec.json.encode({"signed": name}))
