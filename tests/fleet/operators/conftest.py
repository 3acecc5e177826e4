"""A control plane with a signed fleet, on real sockets, and operators of each role."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from causeway_server.fleet.app import BOOTSTRAP_FILE, ServeSettings, running
from causeway_server.fleet.server.plane import ControlPlane
from tests.fleet.repository.fleets import edit
from tests.fleet.server.device import Answered, Device
from tests.fleet.server.postgres import PostgresServer, make_postgres
from tests.fleet.trust.signed_fleet import SignedFleet
from tests.own_task import in_own_task

# Looks come at once, and no verdict ends a stage: operators do.
PACE = "rollout: {stages: [50, 100], least: 20m, first_look: 500ms}"
TOKENS = {"vera": "viewer", "olga": "operator", "april": "approver"}


class Server:
    """A running control plane. `as_`: the token of a request, "" for none."""

    def __init__(self, plane: ControlPlane, url: str, http: aiohttp.ClientSession, signed: SignedFleet) -> None:
        self.plane = plane
        self.url = url
        self.http = http
        self.signed = signed

    @property
    def bootstrap(self) -> str:
        return (self.signed.path / "data" / BOOTSTRAP_FILE).read_text().strip()

    async def ask(
        self, method: str, path: str, body: Any = None, *, as_: str = "april", headers: dict[str, str] | None = None
    ) -> Answered:
        sent = {"authorization": f"Bearer {as_}"} if as_ else {}
        data = None if body is None else msgspec.json.encode(body)
        sent |= {} if data is None else {"content-type": "application/json"}
        async with self.http.request(
            method, self.url + path, data=data, headers=sent | (headers or {}), allow_redirects=False
        ) as response:
            content = await response.read()
            found = msgspec.json.decode(content) if response.content_type == "application/json" and content else content
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answered(response.status, found, names)

    async def get(self, path: str, as_: str = "vera") -> Any:
        answer = await self.ask("GET", path, as_=as_)
        assert answer.status == 200, answer
        return answer.body

    async def post(self, path: str, body: Any = None, as_: str = "april") -> Any:
        answer = await self.ask("POST", path, body if body is not None else {}, as_=as_)
        assert answer.status in (200, 201), answer
        return answer.body

    async def enrolled(self, count: int) -> list[Device]:
        token = (await self.post("/v1/join-tokens", {"cohort": "kiosk", "uses": count}))["token"]
        devices = [Device(self.http, self.url, f"device-{index}") for index in range(count)]
        for device in devices:
            assert (await device.enrol(token)).status == 200
            assert (await device.ask_token()).status == 200
        return devices


def operated_fleet(path: Path) -> SignedFleet:
    """A signed fleet with a token of each role: its owner's name."""
    signed = SignedFleet(path / "fleet")
    edit(signed.path / "fleet.yaml", "rollout: {stages: [1, 50, 100]}", PACE)
    lines = [
        f"  {name}: {{sha256: {hashlib.sha256(name.encode()).hexdigest()}, role: {role}}}"
        for name, role in TOKENS.items()
    ]
    (signed.path / "operators.yaml").write_text("version: 1\ntokens:\n" + "\n".join(lines) + "\n")
    signed.sign("anna", "ben")
    return signed


@asynccontextmanager
async def serving(signed: SignedFleet, database: str = "") -> AsyncIterator[Server]:
    folders = (signed.path, signed.path / "keys", signed.path / "data")
    settings = ServeSettings(*folders, database, port=0, survey_s=1.0)
    async with AsyncExitStack() as stack:
        plane, url = await stack.enter_async_context(running(settings))
        jar = aiohttp.DummyCookieJar()
        http = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=jar))
        yield Server(plane, url, http, signed)


@pytest.fixture
def signed(tmp_path: Path) -> SignedFleet:
    return operated_fleet(tmp_path)


@pytest.fixture
async def server(signed: SignedFleet) -> AsyncIterator[Server]:
    async with in_own_task(serving(signed)) as one:
        yield one


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = make_postgres()
    yield server
    server.stop()
    server.remove()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return ""
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.database()
