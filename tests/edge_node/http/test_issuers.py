"""A daemon whose clients have tokens of an owner's issuer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.config.schema import DeviceIdentityConfig, KeyConfig, ServerConfig
from causeway_server.edge_node.http import api
from causeway_server.router.realtime.event_log import CloseCode
from causeway_server.router.serving.issuers.config import IssuerConfig
from tests.router.issuers.oidc_issuer import AUDIENCE, OidcIssuer, SigningKey, serving_issuer

from ..device import Answer, Device, running


@pytest.fixture
async def issuer() -> AsyncIterator[OidcIssuer]:
    async with serving_issuer(OidcIssuer()) as one:
        yield one


PASSED_ON = """
version: 1
name: passed-on
targets: {large: {at: cloud, model: m-large}}
routes: [{name: all, use: [large]}]
limits: {concurrent: 40, queue: 40}
"""


def identity(issuer: OidcIssuer) -> DeviceIdentityConfig:
    return DeviceIdentityConfig((IssuerConfig(issuer.url, AUDIENCE, ("acme",), interval_s=0.001),))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def post(device: Device, path: str, token: str, **body: object) -> Answer:
    asked = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **body}
    async with device.session.post(path, json=asked, headers=bearer(token)) as answer:
        return Answer(answer.status, dict(answer.headers), await answer.read())


async def test_the_client_is_the_tokens_subject(tmp_path: Path, issuer: OidcIssuer) -> None:
    """In decisions, beside API keys; without either a request is refused."""
    keys = (KeyConfig("till", hashlib.sha256(b"till-key").hexdigest()),)
    server = ServerConfig(port=0, keys=keys)
    async with running(tmp_path, server=server, identity=identity(issuer)) as device:
        for token, client in ((issuer.token(), "acme/olga."), (issuer.token(sub="pia"), "acme/pia.")):
            assert (await device.ask(headers=bearer(token))).status == 200
            assert device.newest().request.client.startswith(client)
        assert (await device.ask(headers=bearer("till-key"))).status == 200
        assert device.newest().request.client == "till"
        for wrong in ({}, bearer("other-key"), bearer(SigningKey.make("one").sign(issuer.claims()))):
            answer = await device.ask(headers=wrong)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_an_issuer_alone_closes_the_daemon(tmp_path: Path, issuer: OidcIssuer) -> None:
    async with running(tmp_path, identity=identity(issuer)) as device:
        assert (await device.ask()).status == 401
        assert (await device.ask(headers=bearer(issuer.token()))).status == 200
        async with device.session.get("/v1/decisions", headers=bearer(issuer.token(sub="pia"))) as answer:
            assert (await answer.json())["data"] == [], "its own requests only"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("claims", "status", "words"),
    [
        ({"tenant": "mallory"}, 403, "accepted for acme only"),
        ({"scope": "jobs"}, 403, "lacks the scope `chat`"),
        ({"exp": 1_700_000_000, "iat": 1_600_000_000}, 401, "expired"),
    ],
)
async def test_a_refusal_has_the_form_of_its_dialect(
    tmp_path: Path, issuer: OidcIssuer, path: str, claims: dict[str, Any], status: int, words: str
) -> None:
    async with running(tmp_path, identity=identity(issuer)) as device:
        answer = await post(device, path, issuer.token(**claims))
    assert answer.status == status
    assert words in answer.json["error"]["message"]
    assert answer.json.get("type") == ("error" if path == "/v1/messages" else None)
    assert answer.headers.get("WWW-Authenticate", "") == ("Bearer" if status == 401 else "")


async def test_jobs_are_their_subjects_and_within_the_tokens_priority(tmp_path: Path, issuer: OidcIssuer) -> None:
    async with running(tmp_path, identity=identity(issuer)) as device:
        olga, pia = issuer.token(priority="bulk"), issuer.token(sub="pia")
        job = (await post(device, "/v1/jobs", olga, priority="interactive")).json
        assert job["priority"] == "bulk"
        for token, status in ((olga, 200), (pia, 404)):
            async with device.session.get(f"/v1/jobs/{job['id']}", headers=bearer(token)) as answer:
                assert answer.status == status
        chat_only = issuer.token(scope="chat")
        assert (await post(device, "/v1/jobs", chat_only)).status == 403
        stored = await post(device, "/v1/responses", chat_only, input="hi", background=True, messages=None)
        assert stored.status in (400, 403)


async def test_regions_of_a_token_bind_its_requests(tmp_path: Path, issuer: OidcIssuer) -> None:
    """Also beside a tag that the client sends: bindings narrow each other."""
    async with running(tmp_path, identity=identity(issuer)) as device:
        answer = await device.ask(tags="cloud", headers=bearer(issuer.token(regions=["eu"])))
        assert (answer.status, answer.headers["x-causeway-route"]) == (200, "edge"), "the cloud is in no region"
        answer = await device.ask(tags="cloud", headers=bearer(issuer.token()))
        assert answer.headers["x-causeway-route"] == "cloud"


async def test_a_token_expires_on_an_open_connection(
    tmp_path: Path, issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a connection's requests is read once, its token is checked again."""
    monkeypatch.setattr(api, "_IDENTIFIED_S", 0.0)
    async with running(tmp_path, identity=identity(issuer)) as device:
        token = issuer.token()
        assert (await device.ask(headers=bearer(token))).status == 200
        issuer.rotate("two", keep=False)
        assert (await device.ask(headers=bearer(issuer.token()))).status == 200
        assert (await device.ask(headers=bearer(token))).status == 401


async def test_what_goes_on_ends_with_its_token(tmp_path: Path, issuer: OidcIssuer) -> None:
    """A live session, a job's events and those of a response in the background say why."""
    async with running(tmp_path, identity=identity(issuer)) as device:
        token = issuer.token()
        job = (await post(device, "/v1/jobs", token, not_before_ms=3_600_000)).json
        device.engine.gate = asyncio.Event()
        made = await post(device, "/v1/responses", token, input="hi", background=True, messages=None)
        paths = (f"/v1/jobs/{job['id']}/events", f"/v1/responses/{made.json['id']}?stream=true")
        streams = [await device.session.get(path, headers=bearer(token)) for path in paths]
        async with device.session.ws_connect("/v1/realtime", headers=bearer(token)) as live:
            assert (await live.receive_json())["type"] == "session.created"
            issuer.rotate("two", keep=False)
            assert (await device.ask(headers=bearer(issuer.token(sub="pia")), model="large")).status == 200
            refused = await live.receive_json()
            assert (await live.receive()).data == CloseCode.TOKEN_REFUSED
        for words in (json.dumps(refused), *[await stream.text() for stream in streams]):
            assert "No key of the issuer" in words
        device.engine.gate.set()


async def test_rotation_under_load_fails_no_request(tmp_path: Path, issuer: OidcIssuer) -> None:
    """Chats that are passed on in callbacks, too."""
    async with running(tmp_path, policy=PASSED_ON, identity=identity(issuer)) as device:
        for turn in range(4):
            issuer.rotate("same" if turn > 1 else f"key-{turn}", keep=turn < 2)
            token = issuer.token()
            answers = await asyncio.gather(*(device.ask(f"q{n}", headers=bearer(token)) for n in range(20)))
            assert {answer.status for answer in answers} == {200}


async def test_problems_name_an_issuer_that_is_away(tmp_path: Path) -> None:
    away = DeviceIdentityConfig((IssuerConfig("http://127.0.0.1:1", AUDIENCE, ("acme",), interval_s=0.001),))
    async with running(tmp_path, identity=away) as device:
        issuer = OidcIssuer()
        issuer.url = "http://127.0.0.1:1"
        answer = await device.ask(headers=bearer(issuer.token()))
        assert (answer.status, answer.json["error"]["code"]) == (503, "identity_unavailable")
        problems = msgspec.json.decode((await device.get("/readyz")).body)["problems"]
        assert any(problem.startswith("http://127.0.0.1:1: The issuer's answer at") for problem in problems)
