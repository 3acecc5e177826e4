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

from ..box import Box, running

BODY = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}


def key(name: str, *rights: str) -> KeyConfig:
    digest = hashlib.sha256(f"{name}-secret".encode()).hexdigest()
    return KeyConfig(name, digest, rights=rights)  # type: ignore[arg-type]


KEYS = (key("kiosk"), key("till"), key("auditor", "decisions"))


@pytest_asyncio.fixture(params=[2000, 1], ids=["in-memory", "on-disk"])
async def box(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Box]:
    """A daemon of three keys. `on-disk`: it keeps one record in memory, so that the others are read from its file."""
    server = ServerConfig(port=0, drain_s=1.0, keys=KEYS)
    async with running(tmp_path, server=server, decisions=DecisionsConfig(memory_records=request.param)) as box:
        yield box


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-secret"}


async def ask(box: Box, name: str) -> str:
    """Ask as a key, and return the decision's id."""
    async with box.session.post("/v1/chat/completions", json=BODY, headers=bearer(name)) as response:
        assert response.status == 200
    await until(lambda: (stats := box.parts.decisions.disk()) is not None and not stats.queued_writes)
    return response.headers["x-causeway-decision"]


async def read(box: Box, name: str, path: str) -> tuple[int, Any]:
    async with box.session.get(path, headers=bearer(name)) as response:
        return response.status, await response.json()


async def listed(box: Box, name: str, query: str = "") -> list[str]:
    status, document = await read(box, name, f"/v1/decisions{query}")
    assert status == 200
    return [record["id"] for record in document["data"]]


async def test_a_key_reads_the_records_of_its_own_requests_alone(box: Box) -> None:
    theirs = [await ask(box, "till"), await ask(box, "till")]
    own = [await ask(box, "kiosk"), await ask(box, "kiosk")]
    await ask(box, "till")
    assert await listed(box, "kiosk") == own[::-1]
    assert await listed(box, "kiosk", "?limit=1") == [own[1]]
    for decision in theirs:
        assert (await read(box, "kiosk", f"/v1/decisions/{decision}"))[0] == 404
    for decision in own:
        status, record = await read(box, "kiosk", f"/v1/decisions/{decision}")
        assert (status, record["request"]["client"]) == (200, "kiosk")


async def test_the_right_decisions_reads_those_of_all(box: Box) -> None:
    theirs, own = await ask(box, "till"), await ask(box, "kiosk")
    assert await listed(box, "auditor") == [own, theirs]
    assert await listed(box, "auditor", "?client=till") == [theirs]
    assert (await read(box, "auditor", f"/v1/decisions/{theirs}"))[0] == 200


async def test_the_records_of_another_client_cannot_be_asked_for(box: Box) -> None:
    await ask(box, "till")
    status, document = await read(box, "kiosk", "/v1/decisions?client=till")
    assert (status, document["error"]["code"]) == (403, "permission_denied")
    assert "rights: [decisions]" in document["error"]["message"]


async def test_the_console_decides_again_what_its_key_may_read(box: Box) -> None:
    theirs = await ask(box, "till")
    for name, status in (("kiosk", 404), ("till", 200), ("auditor", 200)):
        question = {"id": theirs, "signals": {}}
        async with box.session.post("/console/what-if", json=question, headers=bearer(name)) as response:
            assert response.status == status, name


async def test_without_keys_every_program_of_the_device_reads_all(tmp_path: Path) -> None:
    async with running(tmp_path) as box:
        async with box.session.post("/v1/chat/completions", json=BODY) as response:
            decision = response.headers["x-causeway-decision"]
        assert (await box.get(f"/v1/decisions/{decision}")).status == 200
        assert (await box.get("/v1/decisions?client=another")).status == 200
