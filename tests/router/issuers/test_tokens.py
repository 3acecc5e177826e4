"""Tokens of an issuer on a real socket: what is accepted, what is not, and the issuer's bad days."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from causeway_server.router.errors import (
    AuthenticationFailed,
    CausewayError,
    ConfigError,
    IdentityUnavailable,
    PermissionDenied,
)
from causeway_server.router.serving.issuers import documents
from causeway_server.router.serving.issuers.claims import TokenIdentity
from causeway_server.router.serving.issuers.config import ClaimsConfig, IssuerConfig, check_issuers
from causeway_server.router.serving.issuers.keys import parse_jwks
from causeway_server.router.serving.issuers.tokens import IssuerTokens
from tests.certificates import Authority

from .oidc_issuer import AUDIENCE, OidcIssuer, SigningKey, serving_issuer

Tokens = IssuerTokens[TokenIdentity]


def told(identity: TokenIdentity) -> TokenIdentity:
    return identity


def tokens_of(
    issuer: OidcIssuer,
    *,
    claims: ClaimsConfig | None = None,
    folder: Path | None = None,
    clock: Callable[[], float] = time.time,
    interval_s: float = 0.001,
    tenants: tuple[str, ...] = ("acme", "stores"),
) -> Tokens:
    config = IssuerConfig(issuer.url, AUDIENCE, tenants, claims or ClaimsConfig(), interval_s=interval_s)
    return IssuerTokens([config], told, folder, wall_clock=clock, max_lifetime_s=86400.0)


@asynccontextmanager
async def reading(tokens: Tokens) -> AsyncIterator[Tokens]:
    """Read the keys in the background."""
    async with anyio.create_task_group() as tasks:
        tokens.start(tasks)
        try:
            yield tokens
        finally:
            tasks.cancel_scope.cancel()
    await tokens.close()


@pytest.fixture
async def issuer() -> AsyncIterator[OidcIssuer]:
    async with serving_issuer(OidcIssuer()) as one:
        yield one


async def identity(tokens: Tokens, token: str) -> TokenIdentity | None:
    """What a server does with a request."""
    await tokens.ready(f"Bearer {token}")
    return tokens.verify(f"Bearer {token}")


async def refused(tokens: Tokens, token: str) -> str:
    """Return how a token is refused: the status and the message."""
    with pytest.raises(CausewayError) as caught:
        await identity(tokens, token)
    assert caught.type in (AuthenticationFailed, IdentityUnavailable, PermissionDenied)
    return f"{caught.value.status} {caught.value.message}"


@pytest.mark.parametrize(
    "algorithm", ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
)
async def test_a_token_by_each_algorithm_is_verified(issuer: OidcIssuer, algorithm: str) -> None:
    issuer.rotate("two", algorithm)
    async with reading(tokens_of(issuer)) as tokens:
        found = await identity(tokens, issuer.token(priority="bulk", regions=["eu"], jti="t-1"))
        assert found is not None
        assert (found.tenant, found.priority, found.regions, found.token_id) == ("acme", "bulk", ("eu",), "t-1")
        assert found.scopes == {"openid", "chat", "jobs"}
        issuer.key = SigningKey.make("two", algorithm)
        assert (await refused(tokens, issuer.token())).startswith("401 No key of the issuer")


def _public_forms(key: SigningKey) -> list[bytes]:
    """The public key in the forms in which a careless verifier would take it as a secret."""
    public: Any = key.private.public_key()
    pem, ssh = (serialization.Encoding.PEM, serialization.Encoding.OpenSSH)
    forms = ((pem, serialization.PublicFormat.SubjectPublicKeyInfo), (ssh, serialization.PublicFormat.OpenSSH))
    return [json.dumps(key.jwk).encode(), *(public.public_bytes(*form) for form in forms)]


def _by_hmac(claims: dict[str, Any], secret: bytes) -> str:
    parts = ({"alg": "HS256", "kid": "rsa", "typ": "JWT"}, claims)
    signed = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    mac = base64.urlsafe_b64encode(hmac.digest(secret, signed, "sha256")).rstrip(b"=")
    return (signed + b"." + mac).decode()


async def test_algorithms_belong_to_the_keys(issuer: OidcIssuer) -> None:
    """`none`, HMAC with the public key as its secret, a key of the token's own, and another type's algorithm."""
    issuer.rotate("rsa", "RS256")
    async with reading(tokens_of(issuer)) as tokens:
        await identity(tokens, issuer.token())
        claims = issuer.claims()
        own = SigningKey.make("rsa")
        forged = [
            jwt.encode(claims, "", algorithm="none", headers={"kid": "rsa"}),
            *(_by_hmac(claims, secret) for secret in _public_forms(issuer.key)),
            own.sign(claims, jwk=own.jwk, jku=f"{issuer.url}/other"),
            SigningKey("one", "RS256", issuer.key.private).sign(claims),
        ]
        for token in forged:
            assert (await refused(tokens, token)).startswith("401 No key of the issuer")
        assert issuer.reads > 1
    named = {**issuer.published[-1], "alg": "PS256"}
    assert parse_jwks(json.dumps({"keys": [named]}).encode())[0].algorithms == ("PS256",)


async def test_a_token_without_a_key_name_needs_an_issuer_with_one_key(issuer: OidcIssuer) -> None:
    issuer.key = SigningKey.make(None)
    issuer.published = [issuer.key.jwk]
    async with reading(tokens_of(issuer)) as tokens:
        assert await identity(tokens, issuer.token()) is not None
        issuer.published.append(SigningKey.make("other").jwk)
        await next(iter(tokens.issuers.values())).refresh()
        assert (await refused(tokens, issuer.token())).startswith("401 No key of the issuer")


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"aud": "another"}, "401 The token is for another service"),
        ({"aud": ["another", 7]}, "401 The token is for another service"),
        ({"aud": ...}, "401 The token is for another service"),
        ({"exp": 1_600_000_000}, "401 The token has expired."),
        ({"exp": ...}, "401 The token's claim `exp`"),
        ({"exp": "4000000000"}, "401 The token's claim `exp`"),
        ({"iat": ...}, "401 The token's claim `iat`"),
        ({"iat": True}, "401 The token's claim `iat`"),
        ({"iat": 4_000_000_000, "exp": 4_000_000_600}, "401 The token is not valid yet: the clock of this server"),
        ({"nbf": 4_000_000_000}, "401 The token is not valid yet"),
        ({"exp": 4_000_000_000}, "401 The token's lifetime"),
        ({"sub": ""}, "401 The token's claim `sub`"),
        ({"sub": 7}, "401 The token's claim `sub`"),
        ({"cnf": {"jkt": "x"}}, "401 The token is bound to a key of its client"),
        ({"tenant": "evil"}, "403 The token names the tenant 'evil', but this issuer's tokens are accepted for acme"),
        ({"tenant": ...}, "403 The token names no tenant in `tenant`"),
        ({"tenant": ["acme"]}, "403 The token names no tenant"),
        ({"priority": "root"}, "401 The token's claim `priority`"),
        ({"priority": ["bulk"]}, "401 The token's claim `priority`"),
        ({"regions": []}, "401 The token's claim `regions`"),
        ({"regions": "eu:1"}, "401 The token's claim `regions`"),
    ],
    ids=str,
)
async def test_claims_that_do_not_hold_are_refused(issuer: OidcIssuer, claims: dict[str, Any], message: str) -> None:
    async with reading(tokens_of(issuer)) as tokens:
        assert (await refused(tokens, issuer.token(**claims))).startswith(message)


async def test_malformed_tokens_are_refused(issuer: OidcIssuer) -> None:
    async with reading(tokens_of(issuer)) as tokens:
        good = issuer.token()
        head, payload, signature = good.split(".")
        deep = base64.urlsafe_b64encode(b'{"a":' + b"[" * 5000).decode().rstrip("=")
        for token in (
            f"{deep}.{payload}.{signature}",
            f"eyJ.{payload}.{signature}",
            issuer.key.sign(issuer.claims(), crit=["exp"], exp=1),
            issuer.key.sign(issuer.claims(), typ="logout+jwt"),
        ):
            assert (await refused(tokens, token)).startswith("401 ")
        for other in ("", "eyJ", "Basic", f"{head}.{deep}.{signature}", "é" * 10):
            assert await identity(tokens, other) is None, "not a token of this issuer"
        assert "at most 16384 are accepted" in await refused(tokens, good + "x" * 20_000)
        assert tokens.verify(good) is None
        assert await identity(tokens, issuer.key.sign({**issuer.claims(), "iss": "https://other.example"})) is None


async def test_claims_may_have_other_names(issuer: OidcIssuer) -> None:
    names = ClaimsConfig(tenant="/org/a~1b", scopes="/realm_access/roles", regions="https://acme.example/r")
    async with reading(tokens_of(issuer, claims=names)) as tokens:
        token = issuer.token(
            org={"a/b": "stores"}, realm_access={"roles": ["jobs", 7]}, **{"https://acme.example/r": "eu us"}
        )
        found = await identity(tokens, token)
        assert found is not None
        assert (found.tenant, found.scopes, found.regions) == ("stores", {"jobs"}, ("eu", "us"))
        assert (await refused(tokens, issuer.token(org="stores"))).startswith("403 The token names no tenant")
    fixed = ClaimsConfig(tenant="", scopes="")
    async with reading(tokens_of(issuer, claims=fixed, tenants=("acme",))) as tokens:
        found = await identity(tokens, issuer.token(tenant="other", scope=...))
        assert found is not None
        assert (found.tenant, found.scopes) == ("acme", {"chat", "jobs"})


async def test_subjects_of_two_issuers_and_devices_have_different_names(issuer: OidcIssuer) -> None:
    names = []
    async with serving_issuer(OidcIssuer()) as other:
        for at, subject in ((issuer, "kiosk-17"), (issuer, "kiosk-17 "), (issuer, "auth0|é"), (other, "kiosk-17")):
            async with reading(tokens_of(at)) as tokens:
                found = await identity(tokens, at.token(sub=subject))
                assert found is not None
                names.append(found.device)
    assert len(set(names)) == 4
    assert names[0].startswith("kiosk-17.")
    assert names[2].startswith("auth0.")


# --- bad days ---------------------------------------------------------------------------------------------------------


async def test_rotation_under_load_refuses_no_token(issuer: OidcIssuer) -> None:
    """Ten rotations, two of them under the same key name, each with 20 requests at once; forged tokens come between."""
    async with reading(tokens_of(issuer)) as tokens:
        for turn in range(10):
            issuer.rotate("same" if turn > 7 else f"key-{turn}", keep=turn < 8)
            stranger = SigningKey.make("same" if turn % 2 else "unknown").sign(issuer.claims())
            good = [identity(tokens, issuer.token(n=n)) for n in range(20)]
            found = await asyncio.gather(*good, identity(tokens, stranger), return_exceptions=True)
            assert all(isinstance(each, TokenIdentity) for each in found[:-1]), (turn, found)
            assert isinstance(found[-1], AuthenticationFailed)
        assert issuer.reads < 100, "tokens that come together wait for one reading"


async def test_a_withdrawn_key_is_refused_once_the_keys_are_read(issuer: OidcIssuer) -> None:
    async with reading(tokens_of(issuer)) as tokens:
        old = issuer.token()
        assert await identity(tokens, old) is not None
        issuer.rotate("two", keep=False)
        await next(iter(tokens.issuers.values())).refresh()
        assert (await refused(tokens, old)).startswith("401 No key of the issuer")


async def test_keys_are_read_once_in_an_interval(issuer: OidcIssuer) -> None:
    """Although garbage comes all the time, which is not read for twice either."""
    tokens = tokens_of(issuer, interval_s=3600.0)
    one = next(iter(tokens.issuers.values()))
    await one.refresh()
    forged = SigningKey.make("unknown").sign(issuer.claims())
    async with reading(tokens), asyncio.TaskGroup() as tasks:
        await one.newer(lambda: False)  # the reading of `watch`
        waiting = [tasks.create_task(refused(tokens, forged)) for _ in range(20)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert issuer.reads == 2
        assert await identity(tokens, issuer.token()) is not None
        await one.refresh()  # the interval is over
        assert {message[:3] for message in await asyncio.gather(*waiting)} == {"401"}
        assert (await refused(tokens, forged)).startswith("401 ")
        assert issuer.reads == 3


async def test_the_last_keys_are_used_while_the_issuer_hangs(
    issuer: OidcIssuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a restart, too. A token of a newer key is 503, since nothing says that it is forged."""
    async with reading(tokens_of(issuer, folder=tmp_path / "issuers")) as tokens:
        assert await identity(tokens, issuer.token()) is not None
    issuer.hangs = asyncio.Event()
    monkeypatch.setattr(documents, "TIMEOUT_S", 0.05)
    async with reading(tokens_of(issuer, folder=tmp_path / "issuers")) as tokens:
        assert await identity(tokens, issuer.token()) is not None
        newer = SigningKey.make("two").sign(issuer.claims())
        assert (await refused(tokens, newer)).startswith("503 No known key of the issuer")
        assert tokens.problems
    async with reading(tokens_of(issuer)) as tokens:  # without a copy
        assert (await refused(tokens, issuer.token())).startswith("503 The keys of the issuer")
        issuer.hangs.set()
        issuer.hangs = None
        monkeypatch.setattr(documents, "TIMEOUT_S", 10.0)
        await next(iter(tokens.issuers.values())).refresh()
        assert await identity(tokens, issuer.token()) is not None
        assert not tokens.problems


async def test_a_damaged_copy_is_replaced(issuer: OidcIssuer, tmp_path: Path) -> None:
    async with reading(tokens_of(issuer, folder=tmp_path)) as tokens:
        await identity(tokens, issuer.token())
    (copy,) = tmp_path.glob("*.json")  # noqa: ASYNC240
    copy.write_text("{")
    async with reading(tokens_of(issuer, folder=tmp_path)) as tokens:
        assert await identity(tokens, issuer.token()) is not None
    assert json.loads(copy.read_text())["keys"] == issuer.published


def _head(length: int, body: bytes, more: str = "") -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{more}Content-Length: {length}\r\n\r\n".encode() + body
    )


KEYS = json.dumps({"keys": [SigningKey.make("one").jwk]}).encode()
LIES: dict[str, Callable[[OidcIssuer], object]] = {
    "a shorter body than its length": lambda one: setattr(one, "raw", _head(len(KEYS) + 9, KEYS)),
    "a longer body than its length": lambda one: setattr(one, "raw", _head(9, KEYS)),
    "no end": lambda one: setattr(one, "raw", _head(10**9, b" " * 400_000)),
    "not HTTP": lambda one: setattr(one, "raw", b"\x00\xff" * 100),
    "a large body": lambda one: setattr(one, "answer", web.Response(body=b" " * 300_000 + KEYS)),
    "compressed": lambda one: setattr(one, "raw", _head(len(KEYS), KEYS, "Content-Encoding: gzip\r\n")),
    "many keys": lambda one: setattr(one, "published", [SigningKey.make("one", "EdDSA").jwk] * 65),
    "no usable key": lambda one: setattr(
        one,
        "published",
        [
            {"kty": "oct", "k": "c2VjcmV0", "kid": "one"},
            {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "one"},
            {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"},
            {**SigningKey.make("one").jwk, "use": "enc"},
            SigningKey.make("one", "RS256", 1024).jwk,
            7,
        ][:-1],
    ),
    "no keys": lambda one: setattr(one, "published", []),
    "a key that is no object": lambda one: setattr(one, "published", [7]),
    "nested": lambda one: setattr(one, "answer", web.Response(body=b'{"keys":' + b"[" * 100_000)),
    "an error": lambda one: setattr(one, "answer", web.Response(status=500)),
    "a redirect": lambda one: setattr(one, "answer", web.Response(status=302, headers={"Location": one.url})),
    "another issuer": lambda one: one.discovery.update(issuer="https://other.example"),
    "keys over http": lambda one: one.discovery.update(jwks_uri="http://keys.example/keys"),
    "keys in a file": lambda one: one.discovery.update(jwks_uri="file:///etc/passwd"),
    "no keys' URL": lambda one: one.discovery.update(jwks_uri=None),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
async def test_an_issuer_that_lies_changes_no_key(issuer: OidcIssuer, lie: Callable[[OidcIssuer], object]) -> None:
    tokens = tokens_of(issuer)
    one = next(iter(tokens.issuers.values()))
    await one.refresh()
    good = issuer.token()
    lie(issuer)
    await one.refresh()
    assert one.last_error
    assert tokens.verify(f"Bearer {good}") is not None
    await tokens.close()


@pytest.mark.parametrize("fault", ["", "foreign", "expired"])
async def test_keys_come_only_from_the_server_that_its_certificate_names(tmp_path: Path, fault: str) -> None:
    ca = Authority(tmp_path / "ca")
    own = ca.issue("issuer", begins=-3, ends=-1 if fault == "expired" else 30)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(own.cert, own.key)
    trusted = Authority(tmp_path / "other", "other") if fault == "foreign" else ca
    async with serving_issuer(OidcIssuer(), tls) as issuer:
        config = IssuerConfig(issuer.url, AUDIENCE, ("acme",), ClaimsConfig(), ca_file=str(trusted.file))
        tokens: Tokens = IssuerTokens([config], told, None, max_lifetime_s=86400.0)
        [one] = tokens.issuers.values()
        await one.refresh()
        assert (issuer.reads, one.last_error == "") == ((0, False) if fault else (1, True))
        await tokens.close()


async def test_a_clock_in_2015_accepts_no_token(issuer: OidcIssuer) -> None:
    """Expired tokens neither, and none that was verified before the clock was set back."""
    now = [time.time()]
    async with reading(tokens_of(issuer, clock=lambda: now[0])) as tokens:
        good, expired = issuer.token(), issuer.token(iat=1_700_000_000, exp=1_700_000_600)
        assert await identity(tokens, good) is not None
        now[0] = 1_420_070_400.0
        for token in (good, expired):
            message = "401 The token is not valid yet: the clock of this server is at 2015-01-01T00:00:00+00:00."
            assert await refused(tokens, token) == message


async def test_a_verified_token_expires(issuer: OidcIssuer) -> None:
    now = [time.time()]
    async with reading(tokens_of(issuer, clock=lambda: now[0])) as tokens:
        token = issuer.token(exp=now[0] + 60)
        assert await identity(tokens, token) is await identity(tokens, token)
        now[0] += 91
        assert await refused(tokens, token) == "401 The token has expired."


@pytest.mark.parametrize(
    ("urls", "where", "message"),
    [
        (["http://login.example"], "identity.issuers[0].issuer", "use https"),
        (["login.example"], "identity.issuers[0].issuer", "must be a URL"),
        (["https://a.example", "https://a.example"], "identity.issuers[1].issuer", "configured twice"),
        (["https://own.example"], "identity.issuers[0].issuer", "configured twice"),
    ],
)
def test_a_wrong_issuer_is_named(urls: list[str], where: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_issuers([IssuerConfig(url, AUDIENCE, ("acme",)) for url in urls], "https://own.example")
    assert caught.value.where == where


def test_without_a_claim_of_the_tenant_there_is_one_tenant() -> None:
    issuer = IssuerConfig("https://a.example", AUDIENCE, ("acme", "stores"), ClaimsConfig(tenant=""))
    with pytest.raises(ConfigError, match="Name one tenant"):
        check_issuers([issuer])
