"""A signed fleet in a folder with one cohort, a device beside it, and a stand-in for the daemon of the device's
agent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio.from_thread
import anyio.to_thread
import msgspec

from causeway_server.edge_node.agent.agent import Agent
from causeway_server.edge_node.agent.dry_run import examine
from causeway_server.edge_node.agent.inspection import (
    BundleReport,
    BundleRequest,
    UpdateCheckRequest,
    UpdateCheckResult,
)
from causeway_server.edge_node.agent.interfaces import AgentSettings, FleetLink, at_once
from causeway_server.edge_node.agent.journal import BootState, boot
from causeway_server.edge_node.agent.link.identity import Identity
from causeway_server.edge_node.agent.source import DownloadBounds, FolderSource, Source, generator
from causeway_server.edge_node.agent.store import Disk, InstalledBundle
from causeway_server.edge_node.agent.trial import TrialSettings
from causeway_server.edge_node.agent.verifier import check_updates
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.observability.metrics import DeviceCondition, Traffic
from causeway_server.fleet.repository.folder import check_fleet
from causeway_server.fleet.trust.keys import Trust, load_signer, new_key, read_trust
from causeway_server.fleet.trust.offline import sign_offline, signed_manifests
from causeway_server.fleet.trust.online import publish_online
from causeway_server.fleet.trust.published import PublishedFolder
from causeway_server.router.bundle.manifest import WHOLE, BundleManifest, BundleModel, RolloutPlan, bundle_id
from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.bundle.refusals import GoldenAnswerDiffers, UpdateRefused
from causeway_server.router.policy.compiled import Policy, parse_policy
from tests.fleet.trust.signed_fleet import NOW, TRUST

COHORT = "kiosk"
FLEET = """\
version: 1
name: retail
cohorts:
  kiosk:
    policy: policies/kiosk.yaml
{extra}"""
POLICY = """\
version: 1
name: kiosk-{number}
targets:
  small: {{at: edge, model: {model}, can: [chat, completion, embedding]}}
routes:
  - {{name: device, use: [small]}}
"""
CASES = """\
policy: ../kiosk.yaml
cases:
  - {name: the device answers, expect: {route: device, targets: [small]}}
"""
FACTORY = POLICY.format(number=0, model="m-small")


class Publisher:
    """A fleet's signers and its server: they sign bundles and assign them to the devices of one cohort."""

    def __init__(self, path: Path, *, exists: bool = False) -> None:
        self.path = path
        self.files = PublishedFolder(path)
        self.now = NOW
        self._number = 0
        if exists:
            return
        (path / "policies" / "cases").mkdir(parents=True)
        for name in ("anna", "ben", "carla", "server"):
            new_key(path / "keys", name, None)
        (path / "trust.yaml").write_text(TRUST)
        (path / "policies" / "cases" / "kiosk.yaml").write_text(CASES)

    @property
    def folder(self) -> Path:
        return self.files.path

    @property
    def trust(self) -> Trust:
        trust, problems = read_trust(self.path)
        assert trust is not None, problems
        return trust

    def sign(self, *, policy: str = "", extra: str = "", model: str = "m-small") -> str:
        """Sign a new bundle that no plan assigns; return its id."""
        self._number += 1
        text = policy or POLICY.format(number=self._number, model=model)
        (self.path / "policies" / "kiosk.yaml").write_text(text)
        (self.path / "fleet.yaml").write_text(FLEET.format(extra=extra))
        checked = check_fleet(self.path)
        assert not checked.failed, checked
        signers = [load_signer(self.path / "keys" / f"{name}.pem", None) for name in ("anna", "ben")]
        sign_offline(checked, self.trust, self.files, signers, self.now)
        return bundle_id(self.manifest())

    def manifest(self) -> BundleManifest:
        """Return the manifest that was signed last."""
        return signed_manifests(self.files)[COHORT]

    def assign(self, bundle: str, **changes: object) -> None:
        """Give a signed bundle to every device."""
        plan = RolloutPlan(COHORT, "r-1", None, bundle, "salt", WHOLE, {}, frozenset())
        server = load_signer(self.path / "keys" / "server.pem", None)
        publish_online(self.trust, self.files, [server], self.now, {COHORT: msgspec.structs.replace(plan, **changes)})

    def release(self, *, policy: str = "", extra: str = "", model: str = "m-small") -> str:
        """Sign a new bundle and give it to every device; return its id."""
        bundle = self.sign(policy=policy, extra=extra, model=model)
        self.assign(bundle)
        return bundle

    @property
    def root(self) -> str:
        return (self.folder / "tuf" / "metadata" / "1.root.json").read_text()


def member(root: str) -> Identity:
    """Return the identity of a device that trusts `root`."""
    return Identity(device="device-1", tenant="stores", cohort=COHORT, fleet="stores", url="", root=root, joined=0.0)


class ScriptedHost:
    """A stand-in for the daemon; the test sets its condition and its sums of requests."""

    def __init__(self) -> None:
        self.daemon_version = "0.1.0"
        self.memory_bytes = 1 << 33
        self.policy: Policy = parse_policy(FACTORY)
        self.policy_file = Path("factory.yaml")
        self.model_dirs: Sequence[Path] = ()
        self.bundle: str | None = None
        self.used: list[str | None] = []
        self.restarts = 0
        self.unloads = 0
        self.now = DeviceCondition()
        self.nonsense = False
        self.refusal: UpdateRefused | None = None
        self.settings: dict[str, object] = {}

    def condition(self) -> DeviceCondition:
        return self.now

    def needs_restart(self, bundle: InstalledBundle | None) -> bool:
        return (dict(bundle.manifest.settings) if bundle else {}) != self.settings

    async def use(self, bundle: InstalledBundle | None, *, must: bool = False) -> None:
        if self.refusal is not None and bundle is not None:
            raise self.refusal
        self.bundle = None if bundle is None else bundle.id
        text = FACTORY if bundle is None else bundle.policy.read_text()
        self.policy = parse_policy(text)
        self.used.append(self.bundle)

    async def check_model(self, model: BundleModel) -> None:
        if self.nonsense and model.golden:
            raise GoldenAnswerDiffers(f"{model.name} answers nonsense")

    def restart(self) -> None:
        self.restarts += 1

    def serve(self, requests: int, *, errors: int = 0, degraded: int = 0, bucket: int = 0) -> None:
        """Serve requests, which all take as long as a bucket of the latencies says."""
        was = self.now.traffic
        latency = list(was.latency)
        latency[bucket] += requests
        traffic = Traffic(
            was.requests + requests, was.errors + errors, was.degraded + degraded, tuple(latency), was.restarts
        )
        self.now = msgspec.structs.replace(self.now, traffic=traffic)


class InProcess:
    """Inspects as the child process does, without its start."""

    async def check_updates(self, request: UpdateCheckRequest, source: Source) -> UpdateCheckResult:
        def fetch(path: str) -> Iterator[bytes]:
            chunks = generator(source.fetch(path))
            while chunk := anyio.from_thread.run(anext, chunks, b""):
                yield chunk

        return await anyio.to_thread.run_sync(check_updates, request, fetch, time.monotonic)

    async def examine(self, request: BundleRequest) -> BundleReport:
        return await anyio.to_thread.run_sync(examine, request)


class Time:
    """A clock that stands until the test moves it."""

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.unix = NOW.timestamp()

    def pass_s(self, seconds: float) -> None:
        self.monotonic += seconds
        self.unix += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic, lambda: self.unix)


TRIAL = TrialSettings(least_s=600.0, least_requests=200, longest_s=86400.0)
SETTINGS = AgentSettings(trial=TRIAL, download=DownloadBounds(grace_s=20.0))


class TestDevice:
    """One device: its state folder, and one agent after the other."""

    __test__ = False

    def __init__(
        self, state: Path, publisher: Publisher, source: Source | None = None, *, disk: Disk | None = None
    ) -> None:
        self.state = state
        self.folder = state / "fleet"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.publisher = publisher
        self.source: Source = source or FolderSource(publisher.folder)
        self.host = ScriptedHost()
        self.time = Time()
        self.may_change = at_once
        self.disk = disk or Disk()
        self.settings = SETTINGS
        self.booted: BootState
        self.agent: Agent
        self.start()

    def start(self) -> Agent:
        """Start the daemon, as after a crash."""
        self.booted = boot(self.folder, self.host.daemon_version, self.time.unix, disk=self.disk)
        bundle = self.booted.bundle
        self.host.bundle = None if bundle is None else bundle.id
        self.host.policy = parse_policy(FACTORY if bundle is None else bundle.policy.read_text())
        self.host.settings = {} if bundle is None else dict(bundle.manifest.settings)
        self.host.now = DeviceCondition()
        self.agent = Agent(
            folder=self.folder,
            booted=self.booted,
            link=FleetLink(lambda: member(self.publisher.root), self.source, self.settings, self.may_change),
            host=self.host,
            clock=self.time.clock,
            disk=self.disk,
            inspector=InProcess(),
            rng=lambda: 0.5,
        )
        return self.agent

    async def until(self, *states: DeviceState, steps: int = 40) -> DeviceState:
        """Advance until the agent has taken a step and is in one of these states."""
        for _ in range(steps):
            await self.agent.advance()
            if self.agent.state in states:
                return self.agent.state
        raise AssertionError(f"still {self.agent.state}: {self.agent.row}")

    async def prove(self) -> None:
        """Pass the trial that the device is in."""
        await self.agent.advance()
        self.host.serve(300)
        self.time.pass_s(700.0)
        await self.until(DeviceState.IDLE)

    async def change(self) -> None:
        """Change to the wanted bundle and commit it."""
        await self.until(DeviceState.TRIAL)
        await self.prove()
