"""The bed's processes: started together, killed one by one, restarted on the same ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from causeway_server.cloud_pool.accounts.identity.issuing import issue, new_key, read_private
from causeway_server.cloud_pool.core.principal import Grants, Scope
from tests.ports import free_port
from tests.redis_deployments import SentinelDeployment
from tests.redis_server import RedisServer
from tests.stack import Process

from .without import CONFIG, PATCHES, Off

ROOT = Path(__file__).parents[2]
DEVICE_POLICY = """
version: 1
name: bed
targets: {{large: {{at: cloud, model: {model}}}}}
routes: [{{name: all, use: [large]}}]
"""
RESTART_TIMEOUT_S = 60.0
RESTART_PAUSE_S = 0.5
Model = Literal["journaled", "paced"]


class ReplicaSpeed(msgspec.Struct, frozen=True):
    """The speed of a paced replica: a request takes prefill_s + (tokens - 1) * step_s, `slots` run at once."""

    slots: int = 8
    prefill_s: float = 0.1
    step_s: float = 0.05


SPEED = ReplicaSpeed()


class Replica:
    """One Triton with one model, under the product's launcher."""

    def __init__(self, folder: Path, number: int, tier: str, model: Model, speed: ReplicaSpeed) -> None:
        self.name = f"triton-{number}"
        self.tier = tier
        self.journal = folder / f"{self.name}.journal"
        self.journal.touch()
        self._speed = folder / f"{self.name}.speed"
        self.set_speed(speed)
        self.grpc, self.metrics = free_port(), free_port()
        ports = [str(port) for port in (self.grpc, self.metrics)]
        files = ["--journal", str(self.journal), "--speed", str(self._speed)]
        command = [sys.executable, "-m", "tests.bed.replica", tier, "--model", model, *files, "--ports", *ports]
        self.process = Process(self.name, command, folder / f"{self.name}.log", {"PYTHONPATH": str(ROOT)})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc}"

    def set_speed(self, speed: ReplicaSpeed) -> None:
        """Change a paced replica's speed; it takes effect within 0.1 s."""
        written = self._speed.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(speed))
        written.replace(self._speed)

    @property
    def server(self) -> psutil.Process | None:
        return _child(self.process.popen.pid, "tritonserver")

    @property
    def stub(self) -> psutil.Process | None:
        """The model's process."""
        server = self.server
        return None if server is None else _child(server.pid, "triton_python_b")

    @property
    def peak(self) -> int:
        """The most sequences that were inside a paced replica at once; 0 before the first."""
        path = self.journal.with_suffix(".peak")
        return int(path.read_text()) if path.exists() else 0

    def calls(self) -> list[str]:
        """Return the calls of the model: the mark of each request, `-` for the gateways' own probes."""
        return self.journal.read_text().splitlines()


class Bed:
    """All processes of the bed.

    Args:
        tiers: the tier of each replica, in the order of the fallback
        serving: how many of the replicas are endpoints at first; None: all
        root: source tree of the gateways and workers at first
        replicas_of_redis: behind three Sentinels; 0: one Redis without Sentinels
        device: whether there is a daemon, `device-1`, which passes everything on to the first gateway
        without: a mechanism of the gateways and workers that is off (`tests.bed.without`)
    """

    def __init__(
        self,
        folder: Path,
        tiers: tuple[str, ...],
        *,
        model: Model = "paced",
        speed: ReplicaSpeed = SPEED,
        tier: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        workers: int = 2,
        serving: int | None = None,
        without: str = "",
        root: Path = ROOT,
        replicas_of_redis: int = 0,
        device: bool = False,
    ) -> None:
        self.folder = folder
        self._roots: dict[str, Path] = {}
        self._root = root
        self._without = without
        durable = ("--maxmemory-policy", "noeviction")
        self.sentinels = SentinelDeployment(folder, *durable, replicas=replicas_of_redis) if replicas_of_redis else None
        self._server = None if self.sentinels else RedisServer(folder, *durable)
        self.replicas = [Replica(folder, number, name, model, speed) for number, name in enumerate(tiers, 1)]
        self._key = folder / "private.pem"
        new_key(self._key, folder / "keys.json")
        self._ports = [free_port(), free_port()]
        self._operator_ports = [free_port(), free_port()]
        self._device_port = free_port() if device else 0
        self._processes: dict[str, Process] = {}
        self._workers = workers
        self._serving = self.replicas[:serving]
        self.restarts = 0
        (folder / "gateway.yaml").write_text(json.dumps(self._config(tier or {}, config or {}), indent=1))

    def _config(self, tier: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """Return the gateway's configuration, which is written as JSON: JSON is YAML."""
        tiers = []
        for name in dict.fromkeys(replica.tier for replica in self._serving):
            addresses = [replica.address for replica in self._serving if replica.tier == name]
            tiers.append({"name": name, "endpoints": addresses, **tier})
        server = {"drain_s": 2, "readiness_cache_s": 0.2} | more.pop("server", {})
        jobs: dict[str, Any] = {
            "lease_s": 2,
            "backoff_s": 0.1,
            "backoff_max_s": 1,
            "reclaim_interval_s": 0.2,
            "drain_s": 1,
            "max_attempts": 1000,
            "webhooks": {"allowed_networks": ["127.0.0.0/8"], "allow_http": True, "timeout_s": 3},
        }
        identity = {"key_file": "keys.json"}
        redis_url = self.redis.url if self.sentinels is None else self.sentinels.url
        config = {"server": server, "tiers": tiers, "redis": redis_url, "identity": identity, "jobs": jobs}
        off = CONFIG.get(self._without, Off())
        config |= more | {"tiers": [one | off.tier for one in tiers]}
        return config | {section: config.get(section, {}) | keys for section, keys in off.top.items()}

    def token(self, tenant: str, device: str = "kiosk", scopes: tuple[Scope, ...] = ("chat", "jobs")) -> str:
        return issue(
            read_private(self._key),
            tenant=tenant,
            device=device,
            scopes=scopes,
            grants=Grants(priority="interactive", critical=True),
            issuer="causeway",
            audience="causeway-cloud",
            now=time.time(),
            lifetime_s=86_400.0,
        )[0]

    @property
    def redis(self) -> RedisServer:
        """The Redis server, or the one that the Sentinels call the master."""
        if self._server is not None:
            return self._server
        assert self.sentinels is not None
        return self.sentinels.master

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self._ports)

    @property
    def device_url(self) -> str:
        return f"http://127.0.0.1:{self._device_port}"

    @property
    def operator_urls(self) -> tuple[str, ...]:
        """The operators' addresses of the gateways; a token with the scope admin opens them."""
        return tuple(f"http://127.0.0.1:{port}" for port in self._operator_ports)

    @property
    def operator_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token('bed', 'operator', ('admin',))}"}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the processes that this bed restarts: gateway-1, worker-2 …"""
        return tuple(self._processes)

    def start(self) -> None:
        for replica in self.replicas:
            replica.process.ready()
        for number in range(1, 3):
            self._launch(f"gateway-{number}")
        for number in range(1, self._workers + 1):
            self._launch(f"worker-{number}")
        if self._device_port:
            self._launch("device-1")
        for process in self._processes.values():
            process.ready()

    def serve_from(self, replicas: list[Replica]) -> None:
        """Change the endpoints of the only tier. Gateways and workers reload their file, as after an operator's edit;
        replicas that are left out drain."""
        path = self.folder / "gateway.yaml"
        config = json.loads(path.read_text())
        config["tiers"][0]["endpoints"] = [replica.address for replica in replicas]
        path.write_text(json.dumps(config, indent=1))
        for process in self._processes.values():
            process.popen.send_signal(signal.SIGHUP)

    def _launch(self, name: str) -> Process:
        kind, _, number = name.partition("-")
        root = self._roots.get(name, self._root)
        package = "causeway_server.cloud_pool" if root == ROOT else "cloud_pool"  # as before the first release
        program = ["tests.bed.without", self._without] if self._without in PATCHES else [package]
        # Without -P the current folder would come first.
        environment = {"PYTHONPATH": str(root)}
        command = [sys.executable, "-P", "-m"]
        if kind == "device":
            command += self._serve_device()
        else:
            command += [*program, "serve" if kind == "gateway" else "worker"]
            command += ["--config", str(self.folder / "gateway.yaml"), "--log", "info"]
        if kind == "gateway":
            command += ["--port", str(self._ports[int(number) - 1])]
            command += ["--operator-port", str(self._operator_ports[int(number) - 1])]
        process = self._processes[name] = Process(name, command, self.folder / f"{name}.log", environment)
        return process

    def _serve_device(self) -> list[str]:
        """Return the daemon's module with its arguments."""
        policy = self.folder / "policy.yaml"
        policy.write_text(DEVICE_POLICY.format(model=self.replicas[0].tier))
        settings = {
            "policy": policy,
            "state_dir": self.folder / "device",
            "server.port": self._device_port,
            "engine.enabled": "false",
            "clouds.main.url": f"{self.urls[0]}/v1",
            "clouds.main.key": self.token("acme", "device-1"),
            "cloud.probe_interval_s": 0.2,
            "jobs.jitter_s": 0.1,
        }
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return ["causeway_server.edge_node", "serve", *flags]

    async def replace(self, name: str, root: Path = ROOT) -> None:
        """Stop a gateway or worker with SIGTERM and start it from the source tree `root`; it is ready on return."""
        await asyncio.to_thread(self._processes[name].stop)
        self._roots[name] = root
        await asyncio.to_thread(self._launch(name).ready)

    def process(self, name: str) -> Process:
        return self._processes[name]

    async def crash(self, name: str) -> None:
        """Kill a gateway or worker with SIGKILL and restart it as a supervisor does; it is ready on return."""
        self._processes[name].kill()
        ends = time.monotonic() + RESTART_TIMEOUT_S
        while True:
            try:
                self.restarts += 1
                await asyncio.to_thread(self._launch(name).ready)
                return
            except RuntimeError:  # A worker does not start without Redis, which may be down as well.
                if time.monotonic() > ends:
                    raise
            await asyncio.sleep(RESTART_PAUSE_S)

    async def crash_redis(self, down_s: float) -> None:
        """Kill the Redis server. With Sentinels, a replica takes over before the killed server returns as a replica."""
        if self.sentinels is None:
            await asyncio.to_thread(self.redis.kill)
            await asyncio.sleep(down_s)
            await asyncio.to_thread(self.redis.start)
            return
        old = await asyncio.to_thread(self.sentinels.fail_over)
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.sentinels.rejoin, old)

    def reconcile(self) -> set[str]:
        """Return the ids that `causeway-cloud jobs reconcile` names. Raises RuntimeError if it fails."""
        command = [sys.executable, "-m", "causeway_server.cloud_pool", "jobs", "reconcile", "--format", "json"]
        command += ["--config", str(self.folder / "gateway.yaml")]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode not in (0, 1):
            raise RuntimeError(found.stderr)
        return {lost["id"] for lost in json.loads(found.stdout)["lost"]}

    def tails(self) -> str:
        """Return the last lines of all logs."""
        processes = [*self._processes.values(), *(replica.process for replica in self.replicas)]
        return "\n".join(f"--- {process.name}\n{process.tail(12)}" for process in processes)

    def memory_mb(self) -> dict[str, float]:
        """Return the resident memory of each gateway and worker."""
        return {
            name: psutil.Process(process.popen.pid).memory_info().rss / 1e6 for name, process in self._processes.items()
        }

    def close(self) -> None:
        for process in [*self._processes.values(), *(replica.process for replica in self.replicas)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.popen.pid, signal.SIGCONT)  # A tool may have stopped it.
            process.kill()
        (self.sentinels or self.redis).kill()


@contextlib.contextmanager
def running_bed(tiers: tuple[str, ...], **more: Any) -> Iterator[Bed]:
    """Start a bed in a temporary folder, and end and remove everything afterwards."""
    with tempfile.TemporaryDirectory(prefix="bed-") as folder:
        bed = Bed(Path(folder), tiers, **more)
        try:
            bed.start()
            yield bed
        finally:
            bed.close()


def _child(parent: int, name: str) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children():
            if child.name().startswith(name) and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None
