"""Whose decision records an API key reads: its own, and with the right `decisions` those of all."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.router.bundle.settings import DecisionsConfig
from tests.waiting import until

from ..device import Device, running

BODY = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}


def key(name: str, *rights: str) -> KeyConfig:
    digest = hashlib.sha256(f"{name}-secret".encode()).hexdigest()
    return KeyConfig(name, digest, rights=rights)  # type: ignore[arg-type]


KEYS = (key("kiosk"), key("till"), key("auditor", "decisions"))


@pytest_asyncio.fixture(params=[2000, 1], ids=["in-memory", "on-disk"])
async def device(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Device]:
    """A daemon of three keys. `on-disk`: it keeps one record in memory, so that the others are read from its file."""
    server = ServerConfig(port=0, drain_s=1.0, keys=KEYS)
    async with running(tmp_path, server=server, decisions=DecisionsConfig(memory_records=request.param)) as device:
        yield device


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-secret"}


async def ask(device: Device, name: str) -> str:
    """Ask as a key, and return the decision's id."""
    async with device.session.post("/v1/chat/completions", json=BODY, headers=bearer(name)) as response:
        assert response.status == 200
    await until(lambda: (stats := device.parts.decisions.disk()) is not None and not stats.queued_writes)
    return response.headers["x-causeway-decision"]


async def read(device: Device, name: str, path: str) -> tuple[int, Any]:
    async with device.session.get(path, headers=bearer(name)) as response:
        return response.status, await response.json()


async def listed(device: Device, name: str, query: str = "") -> list[str]:
    status, document = await read(device, name, f"/v1/decisions{query}")
    assert status == 200
    return [record["id"] for record in document["data"]]


async def test_a_key_reads_the_records_of_its_own_requests_alone(device: Device) -> None:
    theirs = [await ask(device, "till"), await ask(device, "till")]
    own = [await ask(device, "kiosk"), await ask(device, "kiosk")]
    await ask(device, "till")
    assert await listed(device, "kiosk") == own[::-1]
    assert await listed(device, "kiosk", "?limit=1") == [own[1]]
    for decision in theirs:
        assert (await read(device, "kiosk", f"/v1/decisions/{decision}"))[0] == 404
    for decision in own:
        status, record = await read(device, "kiosk", f"/v1/decisions/{decision}")
        assert (status, record["request"]["client"]) == (200, "kiosk")


async def test_the_right_decisions_reads_those_of_all(device: Device) -> None:
    theirs, own = await ask(device, "till"), await ask(device, "kiosk")
    assert await listed(device, "auditor") == [own, theirs]
    assert await listed(device, "auditor", "?client=till") == [theirs]
    assert (await read(device, "auditor", f"/v1/decisions/{theirs}"))[0] == 200


async def test_the_records_of_another_client_cannot_be_asked_for(device: Device) -> None:
    await ask(device, "till")
    status, document = await read(device, "kiosk", "/v1/decisions?client=till")
    assert (status, document["error"]["code"]) == (403, "permission_denied")
    assert "rights: [decisions]" in document["error"]["message"]


async def test_the_console_decides_again_what_its_key_may_read(device: Device) -> None:
    theirs = await ask(device, "till")
    for name, status in (("kiosk", 404), ("till", 200), ("auditor", 200)):
        question = {"id": theirs, "signals": {}}
        async with device.session.post("/console/what-if", json=question, headers=bearer(name)) as response:
            assert response.status == status, name


async def test_without_keys_every_program_of_the_device_reads_all(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        async with device.session.post("/v1/chat/completions", json=BODY) as response:
            decision = response.headers["x-causeway-decision"]
        assert (await device.get(f"/v1/decisions/{decision}")).status == 200
        assert (await device.get("/v1/decisions?client=another")).status == 200
