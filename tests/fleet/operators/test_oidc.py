"""Sign-in with an OpenID Connect issuer: a real one on a local socket, and what it must not get away with."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from aiohttp import web

from causeway_server.fleet.operators.operators_file import read_operators
from causeway_server.router.errors import ConfigError
from tests.fleet.server.device import Answered
from tests.fleet.trust.signed_fleet import SignedFleet
from tests.router.issuers.oidc_issuer import OidcIssuer, SigningKey, serving_issuer

from .conftest import Server, serving

pytestmark = pytest.mark.slow

OPERATORS = """\
version: 1
oidc: {{issuer: "{issuer}", client_id: causeway, redirect: "http://console.test/v1/oidc/callback"}}
roles: {{approver: [leads], operator: [sre], viewer: [staff]}}
"""
Claims = dict[str, Any]
_ENDPOINTS = {"authorization": "authorize", "token": "token"}


class Issuer(OidcIssuer):
    """An issuer that signs every visitor in as `person`. `spoil` changes the claims of the id token."""

    def __init__(self) -> None:
        super().__init__()
        self.person: Claims = {"sub": "42", "email": "olga@example.com", "email_verified": True}
        self.person["groups"] = ["sre", "staff"]
        self.spoil: Callable[[Claims], Claims] = dict
        self.secret: str | None = None  # of a confidential client
        self._codes: dict[str, dict[str, str]] = {}

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/authorize", self._authorize)
        app.router.add_post("/token", self._token)
        return app

    async def _discovery(self, http: web.Request) -> web.StreamResponse:
        ends = {f"{name}_endpoint": f"{self.url}/{path}" for name, path in _ENDPOINTS.items()}
        self.discovery = ends
        return await super()._discovery(http)

    async def _authorize(self, http: web.Request) -> web.Response:
        code = f"code-{len(self._codes)}"
        self._codes[code] = dict(http.query)
        return web.Response(
            status=302, headers={"Location": f"{http.query['redirect_uri']}?code={code}&state={http.query['state']}"}
        )

    async def _token(self, http: web.Request) -> web.Response:
        form = await http.post()
        asked = self._codes.pop(str(form["code"]), None)
        digest = hashlib.sha256(str(form["code_verifier"]).encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if asked is None or asked["code_challenge"] != challenge or asked["redirect_uri"] != form["redirect_uri"]:
            return web.json_response({"error": "invalid_grant"}, status=400)
        if form.get("client_secret") != self.secret:
            return web.json_response({"error": "invalid_client"}, status=401)
        now = int(time.time())
        usual = {"iss": self.url, "aud": "causeway", "iat": now, "exp": now + 300, "nonce": asked["nonce"]}
        token = self.key.sign(self.spoil(usual | self.person))
        return web.json_response({"id_token": token, "access_token": "x", "token_type": "Bearer"})


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    one = Issuer()
    async with serving_issuer(one):
        yield one


def configured(signed: SignedFleet, issuer: Issuer) -> SignedFleet:
    (signed.path / "operators.yaml").write_text(OPERATORS.format(issuer=issuer.url))
    return signed


async def sign_in(server: Server, *, cookie: str | None = None, state: str = "") -> Answered:
    """What a browser does: to the issuer, and back with its cookie."""
    start = await server.ask("GET", "/v1/oidc/start", as_="")
    assert start.status == 302, start
    kept = start.headers["set-cookie"].partition(";")[0] if cookie is None else cookie
    async with aiohttp.ClientSession() as http, http.get(start.headers["location"], allow_redirects=False) as there:
        query = parse_qs(urlsplit(there.headers["location"]).query)
    path = f"/v1/oidc/callback?code={query['code'][0]}&state={state or query['state'][0]}"
    return await server.ask("GET", path, as_="", headers={"cookie": kept})


async def test_a_person_signs_in_with_the_role_of_a_group(signed: SignedFleet, issuer: Issuer) -> None:
    """RSA and elliptic keys; the audit log has the name; the secret of the sign-in is not for scripts."""
    async with serving(configured(signed, issuer)) as server:
        start = await server.ask("GET", "/v1/oidc/start", as_="")
        asked = parse_qs(urlsplit(start.headers["location"]).query)
        assert (asked["response_type"], asked["code_challenge_method"]) == (["code"], ["S256"])
        assert "HttpOnly" in start.headers["set-cookie"]
        assert "SameSite=Lax" in start.headers["set-cookie"]
        for groups, role in (("staff", "viewer"), (["sre"], "operator"), (["leads", "staff"], "approver")):
            issuer.person["groups"] = groups
            back = await sign_in(server)
            assert (back.status, back.headers["location"]) == (302, "/console"), back
            cookie = back.headers["set-cookie"].partition(";")[0]
            session = await server.ask("GET", "/v1/session", as_="", headers={"cookie": cookie})
            assert session.body == {"name": "olga@example.com", "role": role}
            issuer.rotate(f"after-{role}", "RS256")
        rows = (await server.get("/v1/audit", as_=server.bootstrap))["rows"]
        assert [row["actor"] for row in rows] == ["olga@example.com"] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"iss": "http://mallory.test"},
        {"aud": "another-client"},
        {"exp": 1_000_000_000},
        {"nonce": "belongs to another sign-in"},
        {"sub": None},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_token_that_is_not_for_this_sign_in_is_refused(
    signed: SignedFleet, issuer: Issuer, wrong: Claims
) -> None:
    issuer.spoil = lambda claims: {name: value for name, value in (claims | wrong).items() if value is not None}
    async with serving(configured(signed, issuer)) as server:
        back = await sign_in(server)
        assert (back.status, back.code) == (401, "sign_in_failed")
        assert "set-cookie" not in back.headers


async def named(server: Server) -> str:
    """Sign in, and return the name that the audit log shows."""
    back = await sign_in(server)
    assert back.status == 302, back
    return str((await server.get("/v1/audit", as_=server.bootstrap))["rows"][-1]["actor"])


@pytest.mark.parametrize("verified", [False, None, "true"])
async def test_an_email_that_nobody_verified_names_no_operator(
    signed: SignedFleet, issuer: Issuer, verified: object
) -> None:
    """Anybody can enter another's address at some issuers; `sub` is one person's alone."""
    issuer.person["email_verified"] = verified
    async with serving(configured(signed, issuer)) as server:
        assert await named(server) == f"42@{issuer.url}"
        del issuer.person["email"]
        assert await named(server) == f"42@{issuer.url}"


async def test_another_claim_names_an_operator_where_the_file_says_so(signed: SignedFleet, issuer: Issuer) -> None:
    issuer.person |= {"preferred_username": "olga", "email_verified": False}
    path = configured(signed, issuer).path / "operators.yaml"
    path.write_text(path.read_text().replace("oidc: {", "oidc: {name_claim: preferred_username, "))
    async with serving(signed) as server:
        assert await named(server) == "olga"


@pytest.mark.parametrize("name", ["bootstrap", "Controller", "CI", "a\nb", "x" * 300])
async def test_a_name_of_a_program_is_no_persons(signed: SignedFleet, issuer: Issuer, name: str) -> None:
    issuer.person["email"] = name
    path = configured(signed, issuer).path / "operators.yaml"
    path.write_text(f"{path.read_text()}\ntokens:\n  ci: {{sha256: '{'0' * 64}', role: viewer}}\n")
    async with serving(signed) as server:
        back = await sign_in(server)
        assert (back.status, back.code) == (403, "permission_denied")
        assert "set-cookie" not in back.headers


@pytest.mark.parametrize("name", ["bootstrap", "CONTROLLER", ""])
def test_a_token_cannot_have_a_reserved_name(tmp_path: Path, name: str) -> None:
    text = f"version: 1\ntokens:\n  '{name}': {{sha256: '{'0' * 64}', role: viewer}}\n"
    (tmp_path / "operators.yaml").write_text(text)
    with pytest.raises(ConfigError, match="cannot name a token"):
        read_operators(tmp_path)


async def test_another_key_and_no_signature_are_refused(signed: SignedFleet, issuer: Issuer) -> None:
    async with serving(configured(signed, issuer)) as server:
        issuer.key = SigningKey.make("one")  # not the published one
        assert (await sign_in(server)).code == "sign_in_failed"
        issuer.key = SigningKey.make("unknown")
        assert (await sign_in(server)).code == "sign_in_failed"


async def test_a_sign_in_belongs_to_the_browser_that_began_it(signed: SignedFleet, issuer: Issuer) -> None:
    """A link with another's code and state is refused, and an answer cannot be used twice."""
    async with serving(configured(signed, issuer)) as server:
        assert (await sign_in(server, cookie="")).code == "sign_in_failed"
        deep = base64.b64encode(b'{"more":' + b"[" * 1900).decode()
        for content in ("bm9uc2Vuc2U=", deep):
            assert (await sign_in(server, cookie=f"causeway_sign_in={content}")).code == "sign_in_failed"
        assert (await sign_in(server, state="other")).code == "sign_in_failed"
        other = await server.ask("GET", "/v1/oidc/start", as_="")
        assert (await sign_in(server, cookie=other.headers["set-cookie"].partition(";")[0])).code == "sign_in_failed"
        refused = await server.ask("GET", "/v1/oidc/callback?error=access_denied", as_="")
        assert refused.code == "sign_in_failed"


async def test_a_person_without_a_role_and_an_issuer_that_is_away(signed: SignedFleet, issuer: Issuer) -> None:
    async with serving(configured(signed, issuer)) as server:
        issuer.person["groups"] = ["guests"]
        assert (await sign_in(server)).code == "permission_denied"
        del issuer.person["groups"]
        assert (await sign_in(server)).code == "permission_denied"
    issuer.url = "http://127.0.0.1:1"
    async with serving(configured(signed, issuer)) as server:
        start = await server.ask("GET", "/v1/oidc/start", as_="")
        assert start.code == "sign_in_failed"
        assert "The issuer's answer at http://127.0.0.1:1/.well-known" in start.body["error"]["message"]


async def test_without_an_issuer_there_is_no_single_sign_on(server: Server) -> None:
    assert (await server.ask("GET", "/v1/oidc/start", as_="")).code == "not_found"


async def test_a_confidential_client_sends_its_secret(signed: SignedFleet, issuer: Issuer) -> None:
    """As the file has it now, so that a changed secret needs no restart."""
    issuer.secret = "s3cret"
    path = configured(signed, issuer).path / "operators.yaml"
    path.write_text(path.read_text().replace("oidc: {", "oidc: {client_secret_file: oidc-secret, "))
    secret = signed.path / "oidc-secret"
    secret.write_text("an old one")
    async with serving(signed) as server:
        assert (await sign_in(server)).code == "sign_in_failed"
        secret.write_text("s3cret\n")
        assert await named(server) == "olga@example.com"


async def test_another_issuers_document_is_refused(signed: SignedFleet, issuer: Issuer) -> None:
    """A slash too many in `issuer` makes it another one, as OpenID Connect Discovery has it."""
    path = configured(signed, issuer).path / "operators.yaml"
    path.write_text(path.read_text().replace(f'"{issuer.url}"', f'"{issuer.url}/"'))
    async with serving(signed) as server:
        start = await server.ask("GET", "/v1/oidc/start", as_="")
    assert (start.status, start.code) == (401, "sign_in_failed")
    assert f"is the document of the issuer {issuer.url}, not of {issuer.url}/." in start.body["error"]["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version: 1\n# \xff", "utf-8"),
        (b"version: 2\n", "version"),
        (b"version: 1\nroles: {owner: [leads]}\n", "roles"),
        (OPERATORS.format(issuer="http://issuer.test").partition("roles:")[0].encode(), "`roles` must list"),
        (
            OPERATORS.format(issuer="http://issuer.test").replace("{issuer:", "{client_secret_file: gone, issuer:"),
            "`oidc.client_secret_file`: .*gone",
        ),
    ],
    ids=["not text", "version", "role", "no roles", "no secret"],
)
def test_a_wrong_file_of_operators_is_named(tmp_path: Path, content: bytes | str, words: str) -> None:
    """Those of a fleet without the file are its tokens alone."""
    assert read_operators(tmp_path).oidc is None
    (tmp_path / "operators.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        read_operators(tmp_path)
    assert "operators.yaml" in caught.value.where
