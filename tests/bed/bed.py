"""The bed's processes: started together, killed one by one, started again under the ports that they had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from cloud_pool.accounts.identity.issuing import issue, new_key, read_private
from cloud_pool.config.schema import Config, TierConfig
from tests.redis_server import RedisServer
from tests.stack import Process, free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
RESTART_S = 0.5
Model = Literal["journaled", "paced"]


class Pace(msgspec.Struct, frozen=True):
    """Of a paced replica: a request takes prefill_s + (tokens - 1) * step_s, `slots` at once."""

    slots: int = 8
    prefill_s: float = 0.1
    step_s: float = 0.05


PACE = Pace()


class Replica:
    """One Triton with one model, under its launcher."""

    def __init__(self, folder: Path, number: int, tier: str, model: Model, pace: Pace) -> None:
        self.name = f"triton-{number}"
        self.tier = tier
        self.journal = folder / f"{self.name}.journal"
        self.journal.touch()
        self._pace = folder / f"{self.name}.pace"
        self.pace(pace)
        self.grpc, self.http, self.metrics = free_port(), free_port(), free_port()
        ports = [str(port) for port in (self.grpc, self.http, self.metrics)]
        files = ["--journal", str(self.journal), "--pace", str(self._pace)]
        command = [sys.executable, "-m", "tests.bed.replica", tier, "--model", model, *files, "--ports", *ports]
        self.process = Process(self.name, command, folder / f"{self.name}.log", {"PYTHONPATH": str(ROOT)})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc}"

    def pace(self, pace: Pace) -> None:
        """In force within a tenth of a second."""
        written = self._pace.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(pace))
        written.replace(self._pace)

    @property
    def server(self) -> psutil.Process | None:
        return _one(self.process.popen.pid, "tritonserver")

    @property
    def stub(self) -> psutil.Process | None:
        """The model's process."""
        server = self.server
        return None if server is None else _one(server.pid, "triton_python_b")

    def calls(self) -> list[str]:
        """What the model was asked to run: marks of requests, `-` for the gateways' own."""
        return self.journal.read_text().splitlines()


class Bed:
    """`tiers`: a name for each replica; replicas of one name are one tier, in the order of their first."""

    def __init__(
        self,
        folder: Path,
        tiers: tuple[str, ...],
        *,
        model: Model = "paced",
        pace: Pace = PACE,
        tier: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        workers: int = 2,
    ) -> None:
        self.folder = folder
        self.redis = RedisServer(folder, "--maxmemory-policy", "noeviction")
        self.replicas = [Replica(folder, number, name, model, pace) for number, name in enumerate(tiers, 1)]
        self._key = folder / "private.pem"
        new_key(self._key, folder / "keys.json")
        self._ports = [free_port(), free_port()]
        self._parts: dict[str, Process] = {}
        self._workers = workers
        self.restarts = 0
        (folder / "gateway.yaml").write_text(json.dumps(self._config(tier or {}, config or {}), indent=1))

    def _config(self, tier: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """JSON is YAML, so it is written as such."""
        tiers = []
        for name in dict.fromkeys(replica.tier for replica in self.replicas):
            addresses = [replica.address for replica in self.replicas if replica.tier == name]
            where: dict[str, Any] = {"triton": addresses[0]}
            if len(addresses) > 1:
                where = {"endpoints": addresses}
            tiers.append({"name": name, **where, **tier})
        server = {"drain_s": 2, "readiness_cache_s": 0.2} | more.pop("server", {})
        jobs = {
            "lease_s": 2,
            "backoff_s": 0.1,
            "backoff_max_s": 1,
            "reclaim_interval_s": 0.2,
            "drain_s": 1,
            "max_attempts": 1000,
            "webhooks": {"allowed_networks": ["127.0.0.0/8"], "allow_http": True, "timeout_s": 3},
        }
        identity = {"key_file": "keys.json"}
        plain = {"server": server, "tiers": tiers, "redis": self.redis.url, "identity": identity, "jobs": jobs}
        return plain | more

    def token(self, tenant: str, device: str = "kiosk") -> str:
        return issue(
            read_private(self._key),
            tenant=tenant,
            device=device,
            scopes=("chat", "jobs"),
            issuer="causeway",
            audience="causeway-cloud",
            now=time.time(),
            lifetime_s=86_400.0,
        )[0]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self._ports)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts that are supervised from here: gateway-1, worker-2 …"""
        return tuple(self._parts)

    def start(self) -> None:
        for replica in self.replicas:
            replica.process.ready()
        for number in range(1, 3):
            self._launch(f"gateway-{number}")
        for number in range(1, self._workers + 1):
            self._launch(f"worker-{number}")
        for part in self._parts.values():
            part.ready()

    def serve_from(self, replicas: list[Replica]) -> None:
        """Of the only tier: these are its endpoints from now on. Gateways read their file again, as when an operator
        has edited it; who is left out drains."""
        path = self.folder / "gateway.yaml"
        config = json.loads(path.read_text())
        config["tiers"][0]["endpoints"] = [replica.address for replica in replicas]
        path.write_text(json.dumps(config, indent=1))
        for name, part in self._parts.items():
            if name.startswith("gateway"):
                part.popen.send_signal(signal.SIGHUP)

    def _launch(self, name: str) -> Process:
        kind, _, number = name.partition("-")
        command = [sys.executable, "-m", "cloud_pool", "serve" if kind == "gateway" else "worker"]
        command += ["--config", str(self.folder / "gateway.yaml"), "--log", "info"]
        if kind == "gateway":
            command += ["--port", str(self._ports[int(number) - 1])]
        part = self._parts[name] = Process(name, command, self.folder / f"{name}.log", {"PYTHONPATH": str(ROOT)})
        return part

    def part(self, name: str) -> Process:
        return self._parts[name]

    async def crash(self, name: str) -> None:
        """kill -9 of a gateway or worker; started again as a supervisor does, and ready when this returns."""
        self._parts[name].kill()
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.restarts += 1
                await asyncio.to_thread(self._launch(name).ready)
                return
            except RuntimeError:  # a worker does not start without its Redis, which may be away as well
                if time.monotonic() > ends:
                    raise
            await asyncio.sleep(RESTART_S)

    async def crash_redis(self, away_s: float) -> None:
        await asyncio.to_thread(self.redis.kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(self.redis.start)

    def tails(self) -> str:
        """The ends of all logs, for who has to find out."""
        processes = [*self._parts.values(), *(replica.process for replica in self.replicas)]
        return "\n".join(f"--- {process.name}\n{process.tail(12)}" for process in processes)

    def memory_mb(self) -> dict[str, float]:
        """Resident, of each gateway and worker."""
        return {name: psutil.Process(part.popen.pid).memory_info().rss / 1e6 for name, part in self._parts.items()}

    def close(self) -> None:
        for part in [*self._parts.values(), *(replica.process for replica in self.replicas)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(part.popen.pid, 18)  # SIGCONT, where a tool stopped it
            part.kill()
        self.redis.kill()


@contextlib.contextmanager
def standing(tiers: tuple[str, ...], **more: Any) -> Iterator[Bed]:
    """A bed that is ready, in a folder of its own; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="bed-") as folder:
        bed = Bed(Path(folder), tiers, **more)
        try:
            bed.start()
            yield bed
        finally:
            bed.close()


def has_endpoints() -> bool:
    """Whether a tier may have several replicas."""
    return "endpoints" in TierConfig.__struct_fields__


def laddered(*tiers: str) -> dict[str, Any]:
    """Of the configuration, where there is a ladder: work falls from each tier to the next."""
    return {"degradation": {"tiers": tiers}} if "degradation" in Config.__struct_fields__ else {}


def _one(parent: int, name: str) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            if child.name().startswith(name) and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None
