"""TLS: webhooks go only to the server that the certificate names; the gateway itself has no TLS."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from causeway_server.cloud_pool.storage.config import WebhookConfig
from tests.cloud_pool.http.test_listener import gateway, is_alive
from tests.cloud_pool.jobs.conftest import clock, config, database, new_job, redis_server, store, stores  # noqa: F401  (fixtures)
from tests.cloud_pool.jobs.test_webhooks import ScriptedResolver, WebhookBed, bed  # noqa: F401  (fixtures)
from tests.cloud_pool.jobs.webhook_receiver import receiving

INSIDE = WebhookConfig(allowed_networks=("127.0.0.0/8", "::1/128"), timeout_s=5.0)
NAME = "hooks.example.com"
TOO_OLD = dt.timedelta(days=-1)
Certified = Callable[..., tuple[Path, ssl.SSLContext]]


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    """A certificate that signs itself, as a file, and a server's context with it."""

    def make(*names: str, valid: dt.timedelta = dt.timedelta(days=1)) -> tuple[Path, ssl.SSLContext]:
        key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=2))
            .not_valid_after(now + valid)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        path = tmp_path / "certificate.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        secret = tmp_path / "key.pem"
        pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        secret.write_bytes(key.private_bytes(*pem))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path, secret)
        return path, context

    return make


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@pytest_asyncio.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """Refused handshakes reach the loop's exception handler, which is what these tests provoke."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    yield


@pytest.mark.redis
@pytest.mark.parametrize("listens", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(
    ("names", "valid", "trusted"),
    [
        ((NAME,), dt.timedelta(days=1), False),
        (("other.example.com",), dt.timedelta(days=1), True),
        (("127.0.0.1", "::1"), dt.timedelta(days=1), True),
        ((NAME,), TOO_OLD, True),
    ],
    ids=["not trusted", "another name", "the address instead of the name", "expired"],
)
async def test_server_with_a_wrong_certificate_gets_nothing(
    bed: WebhookBed,  # noqa: F811
    certified: Certified,
    listens: str,
    names: tuple[str, ...],
    valid: dt.timedelta,
    trusted: bool,
) -> None:
    """A server that took over the address cannot show the name's certificate: no byte arrives, the delivery waits."""
    path, context = certified(*names, valid=valid)
    trust = ssl.create_default_context(cafile=str(path)) if trusted else None
    async with receiving(listens, context) as receiver:
        job = await bed.ended_job(f"https://{NAME}:{receiver.port}/hook")
        await bed.sender(INSIDE, ScriptedResolver(listens), trust).deliver_due()
        assert (receiver.arrived, await bed.status(job)) == ([], "pending")


@pytest.mark.redis
@pytest.mark.parametrize("listens", ["127.0.0.1", "::1"])
async def test_server_with_the_right_certificate_gets_the_delivery(
    bed: WebhookBed,  # noqa: F811
    certified: Certified,
    listens: str,
) -> None:
    path, context = certified(NAME)
    trust = ssl.create_default_context(cafile=str(path))
    async with receiving(listens, context) as receiver:
        job = await bed.ended_job(f"https://{NAME}:{receiver.port}/hook")
        await bed.sender(INSIDE, ScriptedResolver(listens), trust).deliver_due()
        assert (len(receiver.arrived), await bed.status(job)) == (1, "delivered")


@pytest.mark.parametrize("listens", ["127.0.0.1", "::1"])
async def test_tls_to_the_gateway_fails(listens: str) -> None:
    """The client gets no session and no plain answer; the next request is answered."""
    async with gateway(read_timeout_s=2.0, host=listens) as app:
        port = int(app.url.removesuffix("/v1").rpartition(":")[2])
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(listens, port, ssl=context)
        assert await is_alive(app)
