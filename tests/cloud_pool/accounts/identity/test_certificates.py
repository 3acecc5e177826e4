"""A gateway over TLS: client certificates as identity, over HTTP and in live sessions; the operators' own address."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import aiohttp
import anyio
import pytest

from causeway_server.cloud_pool.accounts.identity.authenticator import Authenticator, StaticTokens
from causeway_server.cloud_pool.accounts.identity.config import CertificateIdentityConfig, IdentityConfig
from causeway_server.cloud_pool.accounts.identity.fleet import RevocationSnapshot
from causeway_server.cloud_pool.config import Config, Flags, load_config
from causeway_server.cloud_pool.core.principal import ANYONE
from causeway_server.cloud_pool.http.config import OperatorConfig, ServerConfig
from causeway_server.cloud_pool.http.server import gateway_listener
from causeway_server.router.config import ListenerTls
from causeway_server.router.errors import AuthenticationFailed, ConfigError
from causeway_server.router.serving.tls.peers import PeerCertificate, spiffe_id
from tests.certificates import Authority, Issued
from tests.cloud_pool.unreachable import unreachable_tier

from .gateway import ASK, Gateway, running
from .test_over_http import audited, token
from .token_issuer import Issuer

OURS = CertificateIdentityConfig(tenants=("acme",))


def _config(ca: Authority, identity: IdentityConfig, audit: Path) -> Config:
    own = ca.issue("server")
    tls = ListenerTls(str(own.cert), str(own.key), str(ca.file))
    tiers = (unreachable_tier("assistant-large"),)
    return Config(server=ServerConfig(tls=tls), identity=identity, tiers=tiers, audit_file=str(audit))


def _context(ca: Authority, own: Issued) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca.file))
    context.load_cert_chain(own.cert, own.key)
    return context


async def _ask(gateway: Gateway, tls: ssl.SSLContext, bearer: str = "") -> tuple[int, str]:
    """Return the status, and the error's message."""
    headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
    url = f"{gateway.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=ASK, headers=headers, ssl=tls) as answer:
        body = await answer.json()
        return answer.status, body["error"]["message"] if answer.status != 200 else ""


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def test_a_certificate_is_an_identity_and_is_revoked_with_its_device(ca: Authority, tmp_path: Path) -> None:
    """By its SPIFFE ID, or by organization and common name; one of another tenant needs a token."""
    audit = tmp_path / "audit"
    async with running(_config(ca, IdentityConfig(certificates=OURS), audit)) as gateway:
        fleets = _context(ca, ca.issue("a", uri=spiffe_id("Stores", "acme", "kiosk-17")))
        assert await _ask(gateway, fleets) == (200, "")
        assert await _ask(gateway, _context(ca, ca.issue("kiosk-18", organization="acme"))) == (200, "")
        status, message = await _ask(gateway, _context(ca, ca.issue("kiosk-19", organization="other")))
        assert (status, "Authorization" in message) == (401, True)
        devices = {"acme/kiosk-17": time.time()}
        gateway.accounts.revocations.current = RevocationSnapshot(devices=devices)
        assert await _ask(gateway, fleets) == (401, "The device's tokens have been revoked.")
    owners = [(one["tenant"], one["device"]) for one in audited(audit)]
    assert owners[:2] == [("acme", "kiosk-17"), ("acme", "kiosk-18")]


async def test_a_token_must_be_of_the_same_device(ca: Authority, issuer: Issuer, tmp_path: Path) -> None:
    identity = IdentityConfig(key_file=issuer.config.key_file, certificates=OURS)
    async with running(_config(ca, identity, tmp_path / "audit")) as gateway:
        mine = _context(ca, ca.issue("kiosk-17", organization="acme"))
        assert await _ask(gateway, mine, token(issuer)) == (200, "")
        status, message = await _ask(gateway, mine, token(issuer, device="kiosk-18"))
        assert (status, "kiosk-18" in message) == (401, True)


async def test_a_live_session_has_the_certificates_identity(ca: Authority, tmp_path: Path) -> None:
    config = _config(ca, IdentityConfig(certificates=OURS), tmp_path / "audit")
    async with running(config) as gateway, anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
        gateway.server.sessions.start(tasks)
        tls = _context(ca, ca.issue("kiosk-17", organization="acme"))
        url = f"{gateway.url}/v1/realtime?model=assistant-large"
        async with session.ws_connect(url, ssl=tls) as live:
            assert (await live.receive_json())["type"] == "session.created"
        other = _context(ca, ca.issue("kiosk-17", organization="other"))
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await session.ws_connect(url, ssl=other)
        tasks.cancel_scope.cancel()


def test_an_expired_certificate_names_nobody() -> None:
    """A connection, of gRPC or a live session, may outlive it."""
    certificate = PeerCertificate((), "acme", "kiosk", "1", 0.0, 1000.0)
    now = [999.0]
    authenticator = Authenticator(StaticTokens(), certificate_tenants=("acme",), wall_clock=lambda: now[0])
    assert authenticator.principal("", certificate).owner == "acme/kiosk"
    now[0] = 1001.0
    with pytest.raises(AuthenticationFailed, match="expired"):
        authenticator.principal("", certificate)
    assert Authenticator(StaticTokens(), wall_clock=lambda: 0.0).principal("", certificate) is ANYONE


def test_a_certificate_that_outlives_revocations_is_refused() -> None:
    """The revocation of its device is forgotten after 366 days."""
    certificate = PeerCertificate((), "acme", "kiosk", "1", 0.0, 400 * 86400.0)
    authenticator = Authenticator(StaticTokens(), certificate_tenants=("acme",), wall_clock=lambda: 1.0)
    with pytest.raises(AuthenticationFailed, match="366 days"):
        authenticator.principal("", certificate)


async def test_operators_have_certificates_of_their_own(ca: Authority) -> None:
    own = ca.issue("operators")
    config = Config(operator=OperatorConfig(port=0, tls=ListenerTls(str(own.cert), str(own.key))))
    listener = gateway_listener(config.operator_server, None, config.operator_web_origins, "operator.port", plain=())  # type: ignore[arg-type]
    assert listener.url.startswith("https://")
    bad = Config(operator=OperatorConfig(port=0, tls=ListenerTls(str(own.cert), str(ca.file))))
    with pytest.raises(ConfigError) as caught:
        gateway_listener(bad.operator_server, None, bad.operator_web_origins, "operator.port")  # type: ignore[arg-type]
    assert caught.value.where == "operator.tls.key_file"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("identity: {certificates: {tenants: [acme]}}", "identity.certificates.tenants"),
        ("server: {host: 0.0.0.0}", "server.token_file"),
        ("tiers: [{name: a, upstream: {ca_file: ca.pem}}]", "tiers[0].upstream.ca_file"),
        ("tiers: [{name: a, upstream: {kind: openai, urls: ['http://a/v1'], tls: true}}]", "tiers[0].upstream.tls"),
    ],
)
def test_keys_that_have_no_effect_are_refused(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=where.replace("[", r"\[").replace("]", r"\]")):
        load_config(path, Flags())


def test_client_certificates_allow_another_address_than_loopback(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    tls = "tls: {cert_file: a, key_file: b, client_ca_file: c}"
    path.write_text(f"server: {{host: 0.0.0.0, {tls}}}\nidentity: {{certificates: {{tenants: [acme]}}}}")
    assert load_config(path, Flags()).server.tls.client_ca_file == str(tmp_path / "c")
