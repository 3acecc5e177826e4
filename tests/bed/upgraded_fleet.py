"""A control plane that is upgraded while devices poll and a rollout is in flight, taken back, and upgraded again.

Devices of this version speak to both, as devices are upgraded first. Each rollout begins under one version, and ends
under the next. Going back, the earlier version meets the newer database: it refuses it and writes nothing, and
`causeway-fleet downgrade` is the way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.fleet.trust.published import PublishedFolder
from causeway_server.router.bundle.manifest import bundle_id
from tests.ports import free_port

from .bed import ROOT
from .fleet.demo import Program, ProgramFailed, run_command
from .fleet.devices import Behaviour, SimulatedDevice

DEVICES = 40
OLDEST = "0001"  # the revision of the first version with migrations
SIGNERS = ("anna", "ben", "server")
STAGE_S = 300.0
_FLEET = """\
version: 1
name: upgraded
cohorts:
  kiosks:
    policy: policies/kiosk.yaml
    rollout:
      stages: [25, 100]
      first_look: 10s
      silence: 25s
      least: 30s
      most: 45s
      soak: 10s
      per_site: 50
      metrics: {errors: 20, degraded: 20, latency: 30}
"""
_POLICY = """\
version: 1
name: {name}
targets:
  small: {{at: edge, model: assistant}}
routes:
  - {{name: on-device, use: [small]}}
"""
_CASES = """\
policy: ../kiosk.yaml
cases: [{name: answered on the device, request: {prompt_tokens: 12}, expect: {targets: [small]}}]
"""
_TRUST = """\
version: 1
root: {keys: [keys/anna.pub, keys/ben.pub], threshold: 2, expires: 365d}
artifacts: {keys: [keys/anna.pub, keys/ben.pub], threshold: 2, expires: 90d}
rollout: {keys: [keys/server.pub], expires: 7d}
snapshot: {keys: [keys/server.pub], expires: 7d}
timestamp: {keys: [keys/server.pub], expires: 2d}
"""


def python_of(old: Path) -> Path:
    """Return a Python with the packages that the earlier version locks, which this version may no longer need."""
    environment = old.with_name("old-venv")
    if not environment.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install = (environment / "bin" / "pip", "install", "-q", "--require-hashes", "-r")
        subprocess.run([*install, old / "edge_node" / "deploy" / "requirements.txt"], check=True)
    return environment / "bin" / "python"


class Plane:
    """One state folder and one fleet's folder, which both versions use in turn.

    Args:
        database: PostgreSQL's URL; "": SQLite in the state folder.
    """

    def __init__(self, folder: Path, old: Path, database: str) -> None:
        self.fleet, self.state = folder / "fleet", folder / "data"
        self._old_root, self._folder, self._database = old, folder, database
        self._listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self._listen}"
        self.is_old = True
        self._program: Program | None = None
        for name, content in {
            "fleet.yaml": _FLEET,
            "trust.yaml": _TRUST,
            "policies/cases/kiosk.yaml": _CASES,
            "policies/kiosk.yaml": _POLICY.format(name="first"),
        }.items():
            path = self.fleet / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        for name in SIGNERS:
            self.command("keys", "new", name, "--keys", str(self.fleet / "keys"))

    def _module(self, *arguments: str) -> list[str]:
        if not self.is_old:
            return [sys.executable, "-m", "causeway_server.fleet", *arguments]
        environment = ("env", f"--chdir={self._old_root}", f"PYTHONPATH={self._old_root}")
        return [*environment, str(python_of(self._old_root)), "-m", "fleet", *arguments]

    def command(self, *arguments: str) -> str:
        """Run a command of `causeway-fleet` of the version in use. Raises ProgramFailed."""
        return run_command(*self._module(*arguments), cwd=ROOT)

    def sign(self, name: str) -> None:
        (self.fleet / "policies" / "kiosk.yaml").write_text(_POLICY.format(name=name))
        keys = [part for signer in SIGNERS for part in ("--key", str(self.fleet / f"keys/{signer}.pem"))]
        self.command("sign", str(self.fleet), *keys)

    def start(self) -> None:
        state = ("--data" if self.is_old else "--state-dir", str(self.state))
        place = ("--database", self._database) if self._database else ()
        keys = ("--keys", str(self.fleet / "keys"), "--listen", self._listen)
        program = Program(
            "control plane",
            self._module("serve", str(self.fleet), *keys, *state, *place),
            self._folder / "control-plane.log",
        )
        program.ready()
        self._program = program

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()
            self._program.wait()
            self._program = None

    def take_back(self) -> None:
        place = ("--database", self._database) if self._database else ()
        self.command("downgrade", OLDEST, "--state-dir", str(self.state), *place)

    @contextlib.asynccontextmanager
    async def rows(self) -> AsyncIterator[Any]:
        """Yield a connection to the database, which a stopped control plane has left."""
        kind, _, where = (self._database or f"sqlite:///{self.state / 'fleet.db'}").partition("://")
        driver = {"sqlite": "aiosqlite", "postgresql": "asyncpg"}[kind]
        engine = create_async_engine(f"{kind}+{driver}://{where}")
        try:
            async with engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()

    async def digest(self) -> str:
        """Return a digest of every row, and of the published files."""
        found = hashlib.sha256()
        names = (
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            if not self._database
            else "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
        )
        async with self.rows() as connection:
            for table in (await connection.execute(text(names))).scalars().all():
                rows = await connection.execute(text(f'SELECT * FROM "{table}"'))
                found.update(f"{table} {sorted(map(repr, rows))}".encode())
        for path in sorted((self.fleet / "published").rglob("*")):
            if path.is_file():
                found.update(str(path).encode() + path.read_bytes())
        return found.hexdigest()


async def run(old: Path, folder: Path, database: str) -> dict[str, object]:
    """Return what was seen."""
    plane = Plane(folder, old, database)
    found: dict[str, object] = {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        operator = Operator(plane, http)
        try:
            await asyncio.to_thread(plane.sign, "first")
            await asyncio.to_thread(plane.start)
            await operator.enrol(DEVICES // 2)
            rollout = await operator.begin()
            await asyncio.to_thread(plane.stop)  # the devices go on
            plane.is_old = False
            await asyncio.to_thread(plane.command, "lint", "--fix", str(plane.fleet))
            await asyncio.to_thread(plane.start)
            found["rollout of the version before, done on"] = await operator.end(rollout)
            await operator.enrol(DEVICES // 4)
            await asyncio.to_thread(plane.sign, "second")
            rollout = await operator.begin()
            await asyncio.to_thread(plane.stop)
            plane.is_old, before = True, await plane.digest()
            try:
                await asyncio.to_thread(plane.start)
            except ProgramFailed as refused:
                changed = await plane.digest() != before
                found["going back"] = "THE DATABASE CHANGED" if changed else "refused, nothing written"
                found["it says"] = str(refused).splitlines()[-1]
                plane.is_old = False
                await asyncio.to_thread(plane.take_back)
                plane.is_old = True
                await asyncio.to_thread(plane.start)
            else:
                found["going back"] = "starts"
            found["rollout of the newer version, after going back done on"] = await operator.end(rollout)
            await operator.enrol(DEVICES - len(operator.devices))
            await asyncio.to_thread(plane.sign, "third")
            rollout = await operator.begin()
            await asyncio.to_thread(plane.stop)
            plane.is_old = False
            await asyncio.to_thread(plane.start)
            found["rollout begun after going back, done on"] = await operator.end(rollout)
            await operator.close()
            return found | await operator.lost()
        finally:
            await operator.close()
            await asyncio.to_thread(plane.stop)


class Operator:
    """An operator's calls, and the devices of the fleet."""

    def __init__(self, plane: Plane, http: aiohttp.ClientSession) -> None:
        self._plane, self._http = plane, http
        self.devices: list[SimulatedDevice] = []
        self._lives: list[asyncio.Task[None]] = []

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        token = (self._plane.state / "bootstrap-token").read_text().strip()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        data = None if body is None else msgspec.json.encode(body)
        async with self._http.request(method, self._plane.url + path, data=data, headers=headers) as answer:
            found = await answer.read()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {found.decode(errors='replace')[:300]}")
            return msgspec.json.decode(found)

    async def enrol(self, count: int) -> None:
        token = (await self.call("POST", "/v1/join-tokens", {"uses": count, "expires_s": 3600.0}))["token"]
        behaviour = Behaviour(activation_s=0.5, trial_s=1.0, poll_s=20.0, reconnect_s=1.0, telemetry_interval_s=1.0)
        for number in range(len(self.devices), len(self.devices) + count):
            device = SimulatedDevice(self._http, self._plane.url, f"device-{number:03}", f"seed-{number}", behaviour)
            await device.enrol(token)
            self.devices.append(device)
            self._lives.append(asyncio.create_task(device.live()))

    async def begin(self) -> str:
        """Begin the rollout of what was signed last; return its id once some devices run it."""
        bundle = bundle_id(signed_manifests(PublishedFolder(self._plane.fleet))["kiosks"])
        body: dict[str, Any] = {"cohort": "kiosks", "to_bundle": bundle}
        if not self._plane.is_old:
            body["without_replay"] = True
        rollout = await self.call("POST", "/v1/rollouts", body)
        await self._until("in flight", lambda: any(self._runs(rollout)))
        return str(rollout["id"])

    async def end(self, rollout: str) -> int:
        """Wait until a rollout is done and each device runs it; return the number of devices."""
        async with asyncio.timeout(STAGE_S):
            while (found := await self.call("GET", f"/v1/rollouts/{rollout}"))["state"] != "done":
                if found["state"] == "paused":
                    await self.call("POST", f"/v1/rollouts/{rollout}/accept", {"reason": "inconclusive"})
                elif found["state"] in ("draft", "aborted", "reverting", "reverted"):
                    raise RuntimeError(f"{found['state']}: {found['reason']}")
                await asyncio.sleep(0.5)
        await self._until("done", lambda: all(self._runs(found)))
        return len(self.devices)

    def _runs(self, rollout: dict[str, Any]) -> list[bool]:
        return [device.running == rollout["to_bundle"] for device in self.devices]

    async def _until(self, what: str, holds: Any) -> None:
        async with asyncio.timeout(STAGE_S):
            while not holds():
                await asyncio.sleep(0.1)

    async def lost(self) -> dict[str, object]:
        """Compare what the devices sent, and what operators did, with what the control plane has."""
        known = await self.call("GET", "/v1/devices?limit=1000")
        rows = (await self.call("GET", "/v1/audit?limit=500"))["rows"]
        refused = [fault for device in self.devices for fault in device.failures if _is_refusal(fault)]
        await asyncio.to_thread(self._plane.stop)
        async with self._plane.rows() as connection:
            counted = (await connection.execute(text("SELECT SUM(requests) FROM telemetry"))).scalar()
        acknowledged = sum(device.acknowledged for device in self.devices)
        numbers = [row["n"] for row in rows]
        return {
            "devices enrolled, known": f"{len(self.devices)}, {len(known['devices'])}",
            "requests acknowledged, counted": f"{acknowledged}, {counted}",
            "rows of the audit log, in a row": f"{len(numbers)}, {numbers == list(range(1, len(numbers) + 1))}",
            "refusals to devices": f"{len(refused)} {sorted(set(refused))[:3]}",
        }

    async def close(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)


def _is_refusal(failure: str) -> bool:
    """Return whether a device's fault was the control plane's answer, instead of a lost connection."""
    return any(mark in failure for mark in (": 4", ": 5"))
