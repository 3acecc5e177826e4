"""Accepted jobs and batches are in the audit file, and `causeway-cloud jobs reconcile` names those that Redis lost."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.accounts.audit import AuditLog, AuditRecord
from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.cli.jobs import jobs
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient

from .gateway import identify, serving
from .test_api import CHAT, TIER

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


class Bed:
    """A gateway with an audit file, and the command that reads it."""

    def __init__(self, config: JobsConfig, folder: Path) -> None:
        self.audit_file = folder / "audit"
        self._audit = AuditLog(str(self.audit_file))
        self._audit.start()
        self.gateway = JobsGateway(config, {"big": TIER}, JobCallers(identify), CollectorRegistry(), audit=self._audit)
        self.http: aiohttp.ClientSession
        self.config_file = folder / "gateway.yaml"
        settings = {"redis": config.redis, "key_prefix": config.key_prefix}
        self.config_file.write_text(json.dumps({"jobs": settings, "audit_file": "audit"}))

    async def submit(self, **headers: str) -> tuple[int, str]:
        async with self.http.post("/v1/jobs", json=CHAT, headers=headers) as response:
            return response.status, (await response.json()).get("id", "")

    async def create_batch(self) -> str:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", json.dumps(LINE), filename="lines.jsonl")
        async with self.http.post("/v1/files", data=form) as response:
            file = (await response.json())["id"]
        body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with self.http.post("/v1/batches", json=body) as response:
            return str((await response.json())["id"])

    def records(self) -> list[AuditRecord]:
        return [msgspec.json.decode(line, type=AuditRecord) for line in self.audit_file.read_bytes().splitlines()]

    async def reconcile(self, *arguments: str) -> tuple[int, str]:
        """Run the command. It starts an event loop of its own, so it runs on a thread."""

        def call() -> tuple[int, str]:
            found = CliRunner().invoke(jobs, ["reconcile", "--config", str(self.config_file), *arguments])
            return found.exit_code, found.stdout

        return await asyncio.to_thread(call)

    async def close(self) -> None:
        await self.gateway.close()
        self._audit.close()


@pytest_asyncio.fixture
async def bed(config: JobsConfig, tmp_path: Path) -> AsyncIterator[Bed]:
    bed = Bed(config, tmp_path)
    headers = {"authorization": "Bearer acme"}
    async with serving(bed.gateway.api.handler) as url, aiohttp.ClientSession(url, headers=headers) as bed.http:
        yield bed
    await bed.close()


async def test_an_acceptance_is_in_the_audit_file_before_the_caller_is_told(bed: Bed) -> None:
    """Also of a repetition, whose first answer may have been lost; a refused one is not."""
    _, first = await bed.submit(**{"idempotency-key": "k"})
    assert [(record.id, record.outcome) for record in bed.records()] == [(first, "accepted")]
    await bed.submit(**{"idempotency-key": "k"})
    async with bed.http.post("/v1/jobs", json=CHAT | {"model": "absent"}) as response:
        assert response.status == 404
    batch = await bed.create_batch()
    assert [record.id for record in bed.records()] == [first, first, batch]
    record = bed.records()[0]
    assert (record.tenant, record.device, record.route, record.tier) == ("acme", "1", "job", "large")
    assert "secret question" not in bed.audit_file.read_text()


async def test_reconcile_names_each_lost_job_and_batch(bed: Bed, database: RedisClient) -> None:
    names = [(await bed.submit())[1] for _ in range(4)]
    batch = await bed.create_batch()
    assert await bed.reconcile() == (0, "")
    await database.command("DEL", database.key("job", names[1]), database.key("job", names[3]))
    await database.command("DEL", database.key("batch", batch))
    status, printed = await bed.reconcile()
    assert status == 1
    rows = [line.split("\t") for line in printed.splitlines()]
    assert [row[1] for row in rows] == [names[1], names[3], batch]
    assert [row[2] for row in rows] == ["acme/1"] * 3
    assert rows[0][0].endswith("+00:00")
    status, printed = await bed.reconcile("--format", "json")
    found = json.loads(printed)
    assert (status, found["acknowledged"], found["too_old"], found["unreadable_lines"]) == (1, 5, 0, 0)
    assert [(lost["id"], lost["kind"]) for lost in found["lost"]] == [
        (names[1], "job"),
        (names[3], "job"),
        (batch, "batch"),
    ]


async def test_rotated_files_old_acceptances_and_cut_lines(bed: Bed, tmp_path: Path) -> None:
    """A job may be gone at the end of its time to live: an old acceptance is no proof. The last run is named."""
    _, name = await bed.submit()
    plain = bed.records()[0]
    old = msgspec.structs.replace(plain, id="job_old", at=plain.at - 90_000)
    gone = msgspec.structs.replace(plain, id="job_gone")
    ran = msgspec.structs.replace(gone, outcome="ok")
    rotated = tmp_path / "audit.1.gz"
    lines = [msgspec.json.encode(record) for record in (old, gone, ran)]
    rotated.write_bytes(gzip.compress(b"\n".join([*lines, b'{"at":1,"route":"job","id":"jo'])))
    status, printed = await bed.reconcile("--format", "json", str(rotated), str(bed.audit_file))
    found = json.loads(printed)
    assert (status, found["acknowledged"], found["too_old"], found["unreadable_lines"]) == (1, 3, 1, 1)
    assert [(lost["id"], lost["last_run"]) for lost in found["lost"]] == [("job_gone", "ok")]
    assert name not in printed


@pytest.mark.parametrize("files", [(), ("absent",)])
async def test_a_missing_audit_file_is_an_error(bed: Bed, files: tuple[str, ...]) -> None:
    if not files:
        settings = json.loads(bed.config_file.read_text()) | {"audit_file": ""}
        bed.config_file.write_text(json.dumps(settings))
    status, printed = await bed.reconcile(*files)
    assert (status, printed) == (2, "")


async def test_a_file_without_acceptances_is_questioned(bed: Bed) -> None:
    """A wrong file must not look like a clean result."""
    for arguments, said in (((str(bed.config_file),), "Are they the audit files"), (("missing",), "does not exist")):
        command = ["reconcile", "--config", str(bed.config_file), *arguments]
        found = await asyncio.to_thread(CliRunner().invoke, jobs, command)
        assert said in found.stderr, found.output
