"""Erasure of a tenant, a device and a user on a real Redis: nothing of theirs is left, everything of others is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from click.testing import CliRunner

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.accounts.identity.issuing import new_key, read_private
from causeway_server.cloud_pool.accounts.identity.key_set import read_jwks
from causeway_server.cloud_pool.cli.erase import erase
from causeway_server.cloud_pool.core.subject import ErasureSubject
from causeway_server.cloud_pool.erasure import (
    ErasedKind,
    Erasure,
    ErasureConflict,
    gateway_kinds,
    job_kinds,
    sign,
    verify,
)
from causeway_server.cloud_pool.storage.config import FilesConfig, JobsConfig
from causeway_server.cloud_pool.storage.record import LeaseStates, LiveText, NewJob, user_digest
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import CloudFailed, ConfigError, JobStoreUnavailable
from tests.cloud_pool.batches.batch_support import create_batch
from tests.cloud_pool.jobs.conftest import Clock
from tests.cloud_pool.jobs.redis_server import RedisServer
from tests.cloud_pool.storage.redis_contents import contents

MakeJob = Callable[..., NewJob]
SECRET = "erasable"
ACME = ErasureSubject(SECRET)
WEBHOOK = "https://hooks.example.com/"


def every_kind(stores: JobStores, client: redis.asyncio.Redis) -> tuple[ErasedKind, ...]:
    return (*job_kinds(stores), *gateway_kinds(client, client, f"{stores.database.prefix}-cache", IdentityConfig()))


async def fill(stores: JobStores, new_job: MakeJob, tenant: str) -> dict[str, str]:
    """Bring jobs of a tenant's devices into every state, with all that hangs on them. Returns their ids by state."""
    ids = {}
    for state in ("succeeded", "dead", "waiting", "running", "queued"):
        device = "2" if state == "queued" else "1"
        job = new_job(
            id=f"job_{tenant}_{state}",
            owner=f"{tenant}/{device}",
            idempotency=state,
            digest="d",
            webhook=WEBHOOK,
            user=user_digest(tenant, "ann") if state in ("succeeded", "queued") else "",
        )
        ids[state] = (await stores.jobs.accept(job)).id
        if state == "queued":
            continue
        (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
        assert record.id == ids[state]
        fault = CloudFailed("broken")
        if state == "succeeded":
            await stores.jobs.texts.append([LiveText(record.owner, record.id, record.fence, 0, "text")])
            await stores.jobs.succeed(record.id, record.fence, b'{"an":"answer"}')
        elif state == "waiting":
            await stores.jobs.postpone(record.id, record.fence, fault, 3600.0, counts=True)
        elif state == "dead":
            await stores.database.command("HSET", stores.database.key("job", record.id), "max_attempts", 1)
            await stores.jobs.postpone(record.id, record.fence, fault, 0.0, counts=True)
    await create_batch(stores, 2, f"{tenant}/1", f"batch_{tenant}")
    await stores.outbox.signing_secrets(f"{tenant}/1")
    return ids


def of(found: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {key: value for key, value in found.items() if name in key or name.encode() in value}


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis(unix_socket_path=str(redis_server.socket)) as opened:
        yield opened


async def test_nothing_of_an_erased_tenant_is_left(
    config: JobsConfig, clock: Clock, new_job: MakeJob, client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    """Whatever state its jobs are in; a run in progress loses its lease. Another tenant keeps everything."""
    folder = tmp_path / "files"
    folder.mkdir()
    stores = JobStores.open(msgspec.structs.replace(config, files=FilesConfig(path=str(folder))), clock)
    ids = await fill(stores, new_job, SECRET)
    await fill(stores, new_job, "rival")
    usage, cached = f"causeway:tenant:{{{SECRET}}}:usage:2026-11-21", f"{config.key_prefix}-cache:{{0f}}:entry"
    bucket = f"causeway:tenant:{{{SECRET}/submissions}}:requests"
    await client.hset(usage, "large|job|requests", "1")
    await client.hset(bucket, "level", "1")
    await client.hset(cached, "value", b"x")
    before, erasure = await contents(stores.database), Erasure(stores.database, every_kind(stores, client))
    counts = await erasure.count(ACME)
    receipt = await erasure.erase(ACME)
    after = await contents(stores.database)
    await erasure.forget(ACME)
    left = {name: count for name, count in counts.items() if count and not _is_followed(name)}
    assert {name: count for name, count in receipt.erased.items() if name != "queue_marks"} == left
    assert receipt.erased["jobs"] == 5
    assert receipt.erased["batches"] == receipt.erased["files"] == 1
    assert receipt.erased["usage"] == 2
    assert receipt.erased["webhook_deliveries"] == 2
    assert not receipt.resumed
    assert of(await contents(stores.database), SECRET) == {}
    assert not await client.exists(usage, bucket, cached)
    mine = set(of(before, "rival")) - {f"{config.key_prefix}:dead"}
    assert mine == set(of(after, "rival")) - {f"{config.key_prefix}:dead"}
    assert [letter.owner for letter in await stores.jobs.dead_letters()] == ["rival/1"]
    assert len(list(folder.glob("file-*"))) == 1, "the other tenant's"
    lost = await stores.jobs.renew_leases([(ids["running"], 1)], renew=True)
    assert lost == LeaseStates(lost=frozenset({ids["running"]}))
    depths = await stores.jobs.depths()
    assert [(queue.queued, queue.running) for queue in depths.queues if queue.priority == "standard"] == [(1, 1)]
    assert (depths.dead, depths.waiting, depths.pending_deliveries) == (1, 1, 2)
    await stores.close()


async def test_bills_that_no_worker_added_are_erased_with_their_tenant_only(
    stores: JobStores, client: redis.asyncio.Redis
) -> None:
    """However many there are; those of a device or a user are not told apart, and stay."""
    bills, erasure = stores.database.key("usage"), Erasure(stores.database, job_kinds(stores))
    theirs = [f"rival|2026-11-21|large|{at}" for at in range(2)]
    for field in (*(f"{SECRET}|2026-11-21|large|{at}" for at in range(70)), *theirs):
        await client.hset(bills, field, "1")
    for subject in (ErasureSubject(SECRET, device="1"), ErasureSubject(SECRET, user="ann"), ErasureSubject("eras")):
        assert "pending_usage" not in (await erasure.erase(subject)).erased
    assert await client.hlen(bills) == 72
    assert (await erasure.erase(ACME)).erased["pending_usage"] == 70
    assert [await client.hexists(bills, field) for field in theirs] == [True, True]
    assert await client.hlen(bills) == 2


async def test_a_dead_letter_whose_record_is_gone_is_erased_with_its_owner_only(
    stores: JobStores, new_job: MakeJob, client: redis.asyncio.Redis
) -> None:
    for tenant in (SECRET, "rival"):
        ids = await fill(stores, new_job, tenant)
        await client.unlink(stores.database.key("job", ids["dead"]))
    erasure = Erasure(stores.database, job_kinds(stores))
    assert "dead_letters" not in (await erasure.erase(ErasureSubject(SECRET, device="2"))).erased
    assert (await erasure.erase(ErasureSubject(SECRET, device="1"))).erased["dead_letters"] == 1
    assert await client.xlen(stores.database.key("dead")) == 1
    assert [letter.owner for letter in await stores.jobs.dead_letters()] == ["rival/1"]


def _is_followed(name: str) -> bool:
    """Whether the erasure of jobs, batches and files erases these, too."""
    return name in ("dead_letters", "idempotency_keys", "job_lists", "file_lists", "batch_lists", "queue_marks")


@pytest.mark.parametrize(
    ("subject", "left"),
    [
        (ErasureSubject(SECRET, device="1"), {"queued"}),
        (ErasureSubject(SECRET, device="2"), {"succeeded", "dead", "waiting", "running"}),
        (ErasureSubject(SECRET, user="ann"), {"dead", "waiting", "running"}),
        (ErasureSubject(SECRET, user="bob"), {"succeeded", "dead", "waiting", "running", "queued"}),
        (ErasureSubject("eras"), {"succeeded", "dead", "waiting", "running", "queued"}),
        (ErasureSubject("*"), {"succeeded", "dead", "waiting", "running", "queued"}),
    ],
)
async def test_a_device_or_a_user_is_erased_alone(
    stores: JobStores, new_job: MakeJob, subject: ErasureSubject, left: set[str]
) -> None:
    ids = await fill(stores, new_job, SECRET)
    await Erasure(stores.database, job_kinds(stores)).erase(subject)
    assert {state for state, job in ids.items() if await stores.jobs.lookup(job)} == left


async def test_an_interrupted_erasure_is_continued(stores: JobStores, new_job: MakeJob) -> None:
    """By the same command, at whatever item it was killed; the receipt counts all of it."""
    await fill(stores, new_job, SECRET)
    kinds = job_kinds(stores)
    for items in (0, 1):
        with pytest.raises(JobStoreUnavailable):
            await Erasure(stores.database, [_Killed(kind, items) for kind in kinds]).erase(ACME)
    receipt = await Erasure(stores.database, kinds).erase(ACME)
    assert receipt.resumed
    assert (receipt.erased["jobs"], receipt.erased["batches"], receipt.erased["files"]) == (5, 1, 1)
    assert set(of(await contents(stores.database), SECRET)) == set()


class _Killed:
    """A kind that stops after so many items."""

    def __init__(self, kind: ErasedKind, items: int) -> None:
        self.name = kind.name
        self._kind = kind
        self._items = items

    async def find(self, subject: ErasureSubject) -> AsyncIterator[str]:
        async for name in self._kind.find(subject):
            yield name

    async def erase(self, name: str) -> bool:
        if not self._items:
            raise JobStoreUnavailable("killed")
        self._items -= 1
        return await self._kind.erase(name)


async def test_a_tenant_that_goes_on_working_gets_no_receipt(stores: JobStores, new_job: MakeJob) -> None:
    await stores.jobs.accept(new_job(owner=f"{SECRET}/1"))

    class Restless(_Killed):
        async def erase(self, name: str) -> bool:
            await stores.jobs.accept(new_job(owner=f"{SECRET}/1"))
            return await self._kind.erase(name)

    kinds = [Restless(kind, 0) for kind in job_kinds(stores)]
    with pytest.raises(ErasureConflict, match="revoke their tokens"):
        await Erasure(stores.database, kinds).erase(ACME)


async def test_a_changed_receipt_is_not_valid(stores: JobStores, tmp_path: Path) -> None:
    receipt = await Erasure(stores.database, job_kinds(stores)).erase(ACME)
    new_key(tmp_path / "private.pem", tmp_path / "keys.json")
    new_key(tmp_path / "other.pem", tmp_path / "others.json")
    signed = sign(receipt, read_private(tmp_path / "private.pem"))
    assert verify(signed, read_jwks(tmp_path / "keys.json")) == receipt
    document = json.loads(signed)
    document["receipt"]["erased"] = {"jobs": 7}
    for data in (json.dumps(document).encode(), b"{}", b"", signed[:-40]):
        with pytest.raises(ConfigError):
            verify(data, read_jwks(tmp_path / "keys.json"))
    with pytest.raises(ConfigError, match="is not in the key set"):
        verify(signed, read_jwks(tmp_path / "others.json"))


def test_the_command_counts_asks_erases_and_signs(
    config: JobsConfig, clock: Clock, new_job: MakeJob, tmp_path: Path
) -> None:
    async def accept() -> None:
        stores = JobStores.open(config, clock)
        await stores.jobs.accept(new_job(owner=f"{SECRET}/1"))
        await stores.close()

    asyncio.run(accept())
    gateway = tmp_path / "gateway.yaml"
    gateway.write_text(f'redis: {config.redis}\njobs: {{key_prefix: "{config.key_prefix}"}}\n')
    new_key(tmp_path / "private.pem", tmp_path / "keys.json")
    receipt = tmp_path / "receipt.json"
    command = ["--config", str(gateway), "--tenant", SECRET]
    signed = [*command, "--sign", str(tmp_path / "private.pem"), "--receipt", str(receipt)]
    run = CliRunner().invoke
    for arguments, answer, status, said in (
        (["--config", str(gateway)], "", 2, "exactly one of --tenant"),
        (["--config", str(gateway), "--device", "kiosk"], "", 2, "Write the tenant before the name"),
        (["--config", str(gateway), "--tenant", "a/b"], "", 2, "'a/b' is not a valid tenant name"),
        (["--config", str(gateway), "--user", f"{SECRET}/ann", "--dry-run"], "", 0, "0\tjobs"),
        ([*command, "--dry-run"], "", 0, "1\tjobs"),
        (command, "", 2, "Name the private key that signs"),
        (
            signed,
            "n\n",
            2,
            f"Erase all data of tenant {SECRET} permanently? Nothing was changed: there is no terminal to ask at",
        ),
        ([*signed, "--yes", "--receipt", str(tmp_path / "absent" / "r")], "", 2, "No such file or directory"),
        ([*signed, "--yes"], "", 0, "1\tjobs"),
        ([*command, "--dry-run"], "", 0, "0\tjobs"),
        ([*command, "--dry-run"], "", 0, f"There is no data of tenant {SECRET}. Devices of a token file belong to the"),
        (
            ["--verify", str(receipt), "--keys", str(tmp_path / "keys.json")],
            "",
            0,
            f"The receipt is valid: the erasure of tenant {SECRET} finished at",
        ),
    ):
        result = run(erase, arguments, input=answer)
        assert (result.exit_code, said in result.output) == (status, True), result.output
    document = json.loads(receipt.read_text())["receipt"]
    assert document["subject"] == {"tenant": SECRET}
    assert document["erased"]["jobs"] == 1
    assert any("backups" in row["what"] for row in document["left"])


async def test_two_erasures_of_one_subject_at_once_both_have_receipts(
    stores: JobStores, client: redis.asyncio.Redis, new_job: MakeJob
) -> None:
    """At two gateways: the first one ends while the second one looks for more, and leaves no progress behind."""
    await fill(stores, new_job, SECRET)
    looking, ended = asyncio.Event(), asyncio.Event()

    class Held:
        name = "held"

        async def find(self, _: ErasureSubject) -> AsyncIterator[str]:
            looking.set()
            await ended.wait()
            for name in list[str]():
                yield name

        async def erase(self, _: str) -> bool:
            return False

    kinds = every_kind(stores, client)
    second = asyncio.create_task(Erasure(stores.database, (Held(), *kinds)).erase(ACME))
    await looking.wait()
    first = Erasure(stores.database, kinds)
    assert (await first.erase(ACME)).erased["jobs"] > 0
    await first.forget(ACME)
    ended.set()
    receipt = await second
    assert (receipt.erased, receipt.resumed) == ({}, False)
    await Erasure(stores.database, ()).forget(ACME)
    assert not await stores.database.command("EXISTS", stores.database.key("erasure", ACME.digest))
