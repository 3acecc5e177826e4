"""Device, gateways and control plane are upgraded from an earlier commit under load, taken back, and upgraded again.

    python -m tests.bed.upgrades COMMIT [PART ...]

The device: each daemon is the command that operators start, on one state folder, and its cloud is the gateway's
`/v1/jobs` in memory. Clients submit jobs all the time, each with an `Idempotency-Key` until it is acknowledged, so that
some are in flight at each change. The configuration is rewritten by `migrate`. Going back, the earlier daemon either
starts or refuses; then the folder must be as it was. It has to finish its jobs before the next upgrade:
router/UPGRADING.md.

The others: `upgraded_gateways`, which needs Triton's environment, and `upgraded_fleet`, on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import itertools
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.fleet.server.postgres import make_postgres
from tests.tool import run_tool

from . import upgraded_fleet, upgraded_gateways
from .bed import ROOT
from .outbox import POLICY, Client, Daemon, TimedCloud, all_states

JOBS_A_STEP = 300
CLIENTS = 8
NOW = ("causeway_server.edge_node",)
BEFORE = """\
policy: {folder}/policy.yaml
state_dir: {folder}/state
server: {{port: 0}}
engine: {{enabled: false}}
cloud: {{url: "{url}", probe_interval_s: 0.2}}
jobs: {{steady_per_s: 200, jitter_s: 0.5}}
log: warning
"""


def source_of(commit: str, root: Path) -> Path:
    """Write the tree of a commit from before the distribution's present name."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=zip", commit], check=True, capture_output=True
    )
    with zipfile.ZipFile(io.BytesIO(archive.stdout)) as packed:
        packed.extractall(root)
    (root / "causeway-0.dist-info").mkdir()
    (root / "causeway-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: causeway\nVersion: 0\n")
    generate = root / "edge_node" / "sdk" / "setup.py"
    if generate.exists():
        subprocess.run(
            [sys.executable, generate, "-q", "build_py", "--build-lib", root / "sdk"], cwd=generate.parent, check=True
        )
    return root


class Device(Daemon):
    """A state folder that the daemons of both versions use in turn."""

    def __init__(self, folder: Path, cloud: str, old: Path) -> None:
        super().__init__(folder, cloud, 0.0)
        self._folder, self._old = folder, old
        self.config = folder / "edge.yaml"
        self.config.write_text(BEFORE.format(folder=folder, url=cloud))
        self.use(old=True)

    def use(self, *, old: bool) -> None:
        paths = f"{self._old}:{self._old}/sdk:{self._old}/edge_node/sdk/src"
        module = (
            ["env", f"--chdir={self._old}", f"PYTHONPATH={paths}", sys.executable, "-m", "edge_node"]
            if old
            else [sys.executable, "-m", *NOW]
        )
        self._command = [*module, "serve", "--config", str(self.config)]

    def migrate(self) -> None:
        subprocess.run([sys.executable, "-m", *NOW, "migrate", str(self.config)], check=True)

    async def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        await self._process.wait()

    def digest(self) -> str:
        state = self._folder / "state"
        files = [path for path in sorted(state.rglob("*")) if path.is_file()]
        return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


class Load:
    """Clients that submit jobs without a pause, until they are stopped; what they sent is then acknowledged."""

    def __init__(self, device: Device, numbers: Iterator[int]) -> None:
        self.ids: dict[int, str] = {}
        self._stopped = False
        self._tasks = [asyncio.create_task(self._submit(device, numbers)) for _ in range(CLIENTS)]

    async def _submit(self, device: Device, numbers: Iterator[int]) -> None:
        client = Client(device)
        while not self._stopped:
            number = next(numbers)
            self.ids[number] = await client.submit(number, "standard")

    async def accepted(self, count: int) -> None:
        while len(self.ids) < count:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


def lost(states: list[str]) -> int:
    return sum(state != "succeeded" for state in states)


async def run(commit: str, folder: Path) -> dict[str, object]:
    """Return what was seen."""
    (folder / "policy.yaml").write_text(POLICY)
    cloud = TimedCloud()
    await cloud.start()
    device = Device(folder, cloud.url, source_of(commit, folder / "old"))
    await device.start()
    numbers = itertools.count()
    found: dict[str, object] = {}
    try:
        load = Load(device, numbers)
        await load.accepted(JOBS_A_STEP)
        found["accepted before the upgrade, and not yet done"] = f"{len(load.ids)}, {len(load.ids) - len(cloud.order)}"
        await device.stop()  # the clients go on
        device.migrate()
        device.use(old=False)
        await device.start()
        await load.accepted(2 * JOBS_A_STEP)
        await load.stop()
        found["accepted until going back, and not yet done"] = f"{len(load.ids)}, {len(load.ids) - len(cloud.order)}"
        await device.stop()
        now, seen = device.config.read_text(), device.digest()
        device.config.write_text(BEFORE.format(folder=folder, url=cloud.url))
        device.use(old=True)
        try:
            await device.start()
        except RuntimeError:
            found["going back"] = "refused; " + ("nothing written" if device.digest() == seen else "THE FOLDER CHANGED")
        else:
            meanwhile = Load(device, numbers)
            await meanwhile.accepted(JOBS_A_STEP)
            await meanwhile.stop()
            states = await all_states(Client(device), meanwhile.ids)  # as UPGRADING.md says, before the next upgrade
            found["going back"] = f"starts; {len(states)} jobs meanwhile, lost {lost(states)}"
            await device.stop()
        device.config.write_text(now)
        device.use(old=False)
        await device.start()
        states = await all_states(Client(device), load.ids)
        return found | {
            "jobs of both versions": len(states),
            "lost": lost(states),
            "doubled": sum(count - 1 for count in cloud.effects.values()),
        }
    finally:
        await device.kill()
        await cloud.stop()


async def run_part(part: str, commit: str, folder: Path) -> dict[str, object]:
    """Return what was seen of a part."""
    if part == "device":
        return await run(commit, folder)
    old = source_of(commit, folder / "old")
    if part == "gateways":
        return await upgraded_gateways.roll(old, [ROOT, old, ROOT])
    server = make_postgres() if part == "fleet-postgresql" else None
    try:
        return await upgraded_fleet.run(old, folder, server.database() if server else "")
    finally:
        if server:
            server.stop()
            server.remove()


PARTS = ("device", "gateways", "fleet-sqlite", "fleet-postgresql")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bed.upgrades", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; all")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; give some of {', '.join(PARTS)}")
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            for name, value in asyncio.run(run_part(part, options.commit, Path(folder))).items():
                print(f"{part}: {name}: {value}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
