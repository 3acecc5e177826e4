"""A fleet in fake time: a signed folder, a store, a controller, devices that follow the published plan."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from causeway_server.fleet.app import read_fleet_folder
from causeway_server.fleet.controller.loop import Controller
from causeway_server.fleet.controller.publisher import Publisher
from causeway_server.fleet.repository.fleet_file import rollout_settings
from causeway_server.fleet.rollout.rollout import Rollout, apply
from causeway_server.fleet.rollout.settings import RolloutEvent
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.devices import Device, cohort_devices, write_reports
from causeway_server.fleet.store.enrolment import enrol, find_join_token, new_join_token
from causeway_server.fleet.store.rollouts import RolloutRecord, change_rollout, insert_rollout, read_rollout
from causeway_server.fleet.store.telemetry import add_samples
from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.router.bundle.manifest import assigned_bundle, bundle_id
from causeway_server.router.bundle.protocol import LATENCY_BOUNDS_S, TelemetrySample
from tests.fleet.repository.fleets import edit
from tests.fleet.trust.signed_fleet import SignedFleet

START = 1_800_000_000.0
TURN_S = 75.0


class Bed:
    """One fleet over many controllers.

    `errors`: bundle → share of requests that fail under it, in percent. `unfit`: bundle → devices that cannot run it.
    """

    def __init__(self, path: Path, database: str = "") -> None:
        self.signed = SignedFleet(path / "fleet")
        edit(self.signed.path / "fleet.yaml", "stages: [1, 50, 100]", "stages: [1, 50, 100], most: 40m, soak: 20m")
        self.database_file = path / "fleet.db"
        self.url = database or f"sqlite:///{self.database_file}"
        self.now = START
        self.errors: dict[str, int] = {}
        self.unfit: dict[str, set[str]] = {}
        self.off: set[str] = set()
        self.on_device = 100  # of 100 requests
        self.shares: list[int] = []  # published shares of the newest rollout, as they changed

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        store = await Store.open(self.url)
        try:
            yield store
        finally:
            await store.close()

    def publisher(self) -> Publisher:
        return Publisher(self.signed.path, self.signed.path / "keys")

    def controller(self, store: Store, publisher: Publisher | None = None) -> Controller:
        return Controller(store, self.signed.path, publisher or self.publisher(), lambda: self.now)

    def release(self) -> str:
        """Sign the folder as it is; return the kiosks' bundle."""
        self.signed.sign("anna", "ben")
        return bundle_id(signed_manifests(self.signed.published)["kiosk"])

    def new_policy(self, name: str) -> str:
        """Change the kiosks' policy and sign it; return the new bundle."""
        for path in (self.signed.path / "policies" / "kiosk.yaml",):
            edit(path, "{name: device,", f"{{name: device, when: 'request.prompt_tokens < {len(name)}000', ")
            path.write_text(path.read_text() + "  - {name: rest, use: [small]}\n")
        case = self.signed.path / "policies" / "cases" / "kiosk.yaml"
        case.write_text(case.read_text().replace("expect:", "request: {prompt_tokens: 3}\n    expect:", 1))
        return self.release()

    async def enrol(self, store: Store, count: int, cohort: str = "kiosk") -> None:
        async with store.write() as connection:
            token = await new_join_token(
                connection, cohort=cohort, tenant="acme", labels={}, uses=count, expires_s=60.0, now=self.now
            )
            for index in range(count):
                found = await find_join_token(connection, token)
                assert found is not None
                await enrol(connection, Device(f"device-{index}", "acme", cohort, f"{index:043}", found.hash))

    async def begin(
        self, store: Store, rollout: str, to_bundle: str, from_bundle: str | None, *, without_replay: bool = True
    ) -> None:
        """Store a submitted rollout, as the operators' interface does."""
        doc = read_fleet_folder(self.signed.path).cohorts["kiosk"].rollout
        made = Rollout(rollout, "kiosk", to_bundle, from_bundle, f"salt-{rollout}", rollout_settings(doc))
        submitted = apply(made, RolloutEvent.SUBMIT, self.now)
        async with store.write() as connection:
            record = RolloutRecord(submitted, 1, "anna", self.now, self.now, without_replay=without_replay)
            await insert_rollout(connection, record)

    async def decide(self, store: Store, rollout: str, event: RolloutEvent) -> None:
        record = await self.record(store, rollout)
        after = apply(record.rollout, event, self.now, reason="by the test")
        async with store.write() as connection:
            await change_rollout(connection, msgspec.structs.replace(record, rollout=after))

    async def record(self, store: Store, rollout: str) -> RolloutRecord:
        async with store.read() as connection:
            record = await read_rollout(connection, rollout)
        assert record is not None
        return record

    async def rollout(self, store: Store, rollout: str) -> Rollout:
        return (await self.record(store, rollout)).rollout

    async def devices(self, store: Store) -> list[Device]:
        async with store.read() as connection:
            return await cohort_devices(connection, "kiosk")

    async def devices_act(self, store: Store) -> None:
        """Let each device that is on take the bundle that the published plan assigns, reports it, and what it did."""
        plan = self.publisher().published().get("kiosk")
        if plan is not None and (not self.shares or self.shares[-1] != plan.share):
            self.shares.append(plan.share)
        changed, samples = [], []
        for device in await self.devices(store):
            if device.id in self.off:
                continue
            running, quarantined = device.running, device.quarantined_json
            assigned = running if plan is None else assigned_bundle(plan, device.id, running)
            if device.id in self.unfit.get(assigned or "", ()):
                quarantined = msgspec.json.encode([assigned]).decode()
            else:
                running = assigned
            since = device.running_since if running == device.running else self.now
            rollout = "" if plan is None else plan.rollout
            changed.append(
                msgspec.structs.replace(
                    device,
                    last_seen=self.now,
                    running=running,
                    running_since=since,
                    rollout=rollout,
                    quarantined_json=quarantined,
                )
            )
            samples.append((device.id, self._sample(running)))
        async with store.write() as connection:
            await write_reports(connection, changed, ())
            await add_samples(connection, samples, self.now)

    def _sample(self, running: str | None) -> TelemetrySample:
        bad = self.errors.get(running or "", 0)
        latency = (100, *(0 for _ in LATENCY_BOUNDS_S))
        return TelemetrySample(
            bundle=running, began=self.now - TURN_S, ended=self.now, requests=100, errors=bad, degraded=0,
            latency=latency, on_device=self.on_device,
        )  # fmt: skip

    async def turn(self, store: Store, controller: Controller, turns: int = 1) -> None:
        for _ in range(turns):
            while await controller.tick():
                pass
            await self.devices_act(store)
            self.now += TURN_S

    async def until(self, store: Store, controller: Controller, rollout: str, *states: str) -> Rollout:
        """Advance time until the rollout is in one of the states; else an approver accepts each pause."""
        current = await self.rollout(store, rollout)
        for _ in range(400):
            if current.state in states:
                return current
            if current.state == "paused":
                await self.decide(store, rollout, RolloutEvent.ACCEPT)
            await self.turn(store, controller)
            current = await self.rollout(store, rollout)
        raise AssertionError(f"after 400 turns {rollout} is {current.state}: {current.reason}")

    def back_up(self) -> bytes:
        return back_up(self.database_file)

    def restore(self, backup: bytes) -> None:
        restore(self.database_file, backup)


def back_up(database: Path) -> bytes:
    """Return SQLite's database as a backup has it."""
    copy = database.with_suffix(".backup")
    with sqlite3.connect(database) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    return copy.read_bytes()


def restore(database: Path, backup: bytes) -> None:
    """Replace the database by a backup of it; no process may have it open."""
    for path in database.parent.glob(f"{database.name}*"):
        path.unlink()
    database.write_bytes(backup)
