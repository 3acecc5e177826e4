"""The erasure of a client's data: no byte of the state folder tells of it afterwards, and others' data is as before."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from causeway_server.edge_node import app
from causeway_server.edge_node.agent.link.records import RecordSample
from causeway_server.edge_node.agent.link.telemetry import TelemetryLog
from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import DeviceFilesConfig, KeyConfig, ServerConfig
from causeway_server.edge_node.erasure import ErasureApi
from causeway_server.edge_node.observability.metrics import Traffic
from causeway_server.router.decision.sessions import client_of
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from tests.fleet.cli.test_replay import records
from tests.waiting import until

from .device import POLICY, Device, running
from .storage.encrypted import ReadableKeys

KIOSK, TILL, OFFICE = "planted-kiosk", "planted-till", "office"
STORES = {"cache", "decisions", "sessions", "responses", "jobs", "file"}


class OpenKeys(ReadableKeys):
    """Keys that encrypt and hide nothing, so that every byte can be searched."""

    def keyed(self, name: str | bytes) -> str | bytes:
        return name


@asynccontextmanager
async def device_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Device]:
    monkeypatch.setattr(app, "StateKeys", OpenKeys)
    keys = [KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in (KIOSK, TILL)]
    keys.append(KeyConfig(OFFICE, hashlib.sha256(OFFICE.encode()).hexdigest(), rights=("erasure",)))
    server = ServerConfig(port=0, drain_s=1.0, keys=tuple(keys))
    policy = POLICY + "session: {pin: tool_loop, mode: prefer}\n"
    async with running(folder, policy=policy, server=server, files=DeviceFilesConfig(accept=True)) as device:
        yield device


async def call(device: Device, client: str, method: str, path: str, **content: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {client}"}
    async with device.session.request(method, path, headers=headers, **content) as response:
        return response.status, await response.json()


async def plant(device: Device, client: str) -> dict[str, str]:
    """Leave something of a client in every store; return the paths at which it is found."""
    device.engine.words = (client, " answers", ".")
    messages = [{"role": "user", "content": f"{client} asks"}]
    chat: dict[str, Any] = {"model": "auto", "messages": messages}
    await call(device, client, "POST", "/v1/chat/completions", json=chat | {"temperature": 0})
    before = 0 if device.parts.jobs.stats is None else device.parts.jobs.stats.ended["succeeded"]
    _, job = await call(device, client, "POST", "/v1/jobs", json=chat | {"temperature": 1})
    stats = device.parts.jobs.stats
    assert stats is not None
    await until(lambda: stats.ended["succeeded"] > before)
    await call(device, client, "POST", "/v1/jobs", json=chat | {"temperature": 1, "not_before_ms": 3_600_000})
    await call(device, client, "POST", "/v1/webhooks/secret", json={})
    stored = {"model": "auto", "input": f"{client} asks", "store": True}
    private = stored | {"causeway": {"tags": ["private"]}}
    _, response = await call(device, client, "POST", "/v1/responses", json=stored)
    _, hidden = await call(device, client, "POST", "/v1/responses", json=private)
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", f"{client} wrote".encode(), filename=f"{client}.txt")
    _, file = await call(device, client, "POST", "/v1/files", data=form)
    await until(lambda: stores_with(device, client) == STORES)
    return {
        "job": f"/v1/jobs/{job['id']}",
        "response": f"/v1/responses/{response['id']}",
        "private response": f"/v1/responses/{hidden['id']}",
        "file": f"/v1/files/{file['id']}",
    }


def stores_with(device: Device, word: str) -> set[str]:
    """The stores with a word in any byte of their files, free pages and logs included."""
    folder = Path(device.app.config.state_dir)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "keys.json"]
    words = (word.encode(), client_of(word))
    return {path.name.partition("-")[0] for path in files if any(one in path.read_bytes() for one in words)}


async def statuses(device: Device, client: str, paths: dict[str, str]) -> set[int]:
    return {(await call(device, client, "GET", path))[0] for path in paths.values()}


def verified(signed: dict[str, Any]) -> Any:
    """The receipt in a JWS, whose signature is checked with the key in its header."""
    head, payload, signature = signed["jws"].split(".")
    key = Ed25519PublicKey.from_public_bytes(_decoded(json.loads(_decoded(head))["jwk"]["x"]))
    key.verify(_decoded(signature), f"{head}.{payload}".encode())
    with pytest.raises(InvalidSignature):
        key.verify(_decoded(signature), f"{head}.{payload[:-4]}AAAA".encode())
    return json.loads(_decoded(payload))


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


async def test_nothing_of_a_client_is_left_and_others_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with device_of(tmp_path, monkeypatch) as device:
        kiosk, till = await plant(device, KIOSK), await plant(device, TILL)
        status, signed = await call(device, KIOSK, "DELETE", "/v1/me/data")
        receipt = verified(signed)
        assert (status, receipt) == (200, signed["receipt"])
        assert (receipt["client"], set(receipt["left"]) != set()) == (KIOSK, True)
        counts = {kind: count for kind, count in receipt["erased"].items() if kind not in ("sessions", "decisions")}
        assert counts == {"jobs": 2, "webhook_secrets": 1, "cached_answers": 1, "files": 1, "responses": 2}
        assert receipt["erased"]["sessions"] > 0
        assert receipt["erased"]["decisions"] > 3
        await until(lambda: stores_with(device, KIOSK) == set())
        assert await statuses(device, KIOSK, kiosk) == {404}
        assert (await call(device, KIOSK, "GET", "/v1/jobs"))[1]["data"] == []
        assert await statuses(device, TILL, till) == {200}
        assert len((await call(device, TILL, "GET", "/v1/jobs"))[1]["data"]) == 2
        assert stores_with(device, TILL) == STORES
        status, signed = await call(device, KIOSK, "DELETE", "/v1/me/data")
        assert set(verified(signed)["erased"].values()) == {0}


async def test_the_fleet_may_order_to_erase_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with device_of(tmp_path, monkeypatch) as device:
        for client in (KIOSK, TILL):
            await plant(device, client)
        receipt = verified({"jws": await ErasureApi(device.parts, tmp_path).for_fleet("")})
        assert (receipt["client"], receipt["erased"]["jobs"], receipt["erased"]["files"]) == ("", 4, 2)
        await until(lambda: stores_with(device, KIOSK) | stores_with(device, TILL) == set())


@pytest.mark.parametrize("client", ["till", ""])
async def test_no_record_waits_for_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """Neither a held one, nor in a message, nor in the file; the sums in the message are still sent once."""
    now, sums, keys = [0.0], [Traffic()], StateKeys(tmp_path)
    clock = Clock(lambda: now[0], lambda: now[0])
    drawn = RecordSample(3600.0, clock.monotonic, random.Random(7))
    drawn.per_hour = 3600.0

    def opened() -> TelemetryLog:
        return TelemetryLog("kiosk-1", "boot", lambda: sums[0], clock, tmp_path, drawn, keys)

    telemetry = opened()
    for record in records(8, private=0):
        drawn.add(record)
    now[0], sums[0] = 4.0, Traffic(requests=8)
    telemetry.cut(None)
    telemetry.keep()
    sent = telemetry.next()
    assert sent is not None
    assert len(sent.records) == 4
    for record in records(8, private=0, first=8):
        drawn.add(record)
    async with device_of(tmp_path / "device", monkeypatch) as device:
        fleet: Any = SimpleNamespace(records=drawn, telemetry=telemetry)
        receipt = verified({"jws": await ErasureApi(replace(device.parts, fleet=fleet), None).for_fleet(client)})
    assert receipt["erased"]["unsent_records"] == 12
    now[0] = 3600.0
    assert drawn.take(32) == ()
    for log in (telemetry, opened()):
        assert log.next() == msgspec.structs.replace(sent, records=())


async def test_a_running_job_is_stopped_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with device_of(tmp_path, monkeypatch) as device:
        device.engine.gate = asyncio.Event()
        chat = {"model": "auto", "messages": [{"role": "user", "content": f"{KIOSK} asks"}], "temperature": 1}
        await call(device, KIOSK, "POST", "/v1/jobs", json=chat)
        await device.engine.entered.wait()
        _, signed = await call(device, KIOSK, "DELETE", "/v1/me/data")
        assert signed["receipt"]["erased"]["jobs"] == 1
        await until(lambda: device.engine.running == 0)
        await until(lambda: stores_with(device, KIOSK) == set())


async def test_another_client_s_data_needs_the_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command erases with a key that has it."""
    async with device_of(tmp_path, monkeypatch) as device:
        till = await plant(device, TILL)
        status, refused = await call(device, KIOSK, "DELETE", f"/v1/me/data?client={TILL}")
        assert (status, refused["error"]["code"]) == (403, "permission_denied")
        for caller in (KIOSK, OFFICE):  # an empty name is not all of them
            assert (await call(device, caller, "DELETE", "/v1/me/data?client="))[0] == 400
        assert await statuses(device, TILL, till) == {200}
        url = f"http://127.0.0.1:{device.app.port}"
        options = ["--url", url, "--api-key", OFFICE, "--client", TILL, "--yes"]
        result = await asyncio.to_thread(CliRunner().invoke, main, ["erase", *options, "--format", "json"])
        assert verified(json.loads(result.output))["client"] == TILL
        assert await statuses(device, TILL, till) == {404}
        result = await asyncio.to_thread(CliRunner().invoke, main, ["erase", *options])
        assert "0\tjobs" in result.output
        assert "left: clouds and brokers" in result.output
