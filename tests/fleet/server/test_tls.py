"""A control plane over TLS, its CA, and the certificates that devices get and renew."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from causeway_server.edge_node.agent.link.certificate import DeviceCertificate
from causeway_server.fleet.cli.commands import main
from causeway_server.fleet.trust.certificates import DEVICE_S, Authority
from causeway_server.router.config import ListenerTls
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls

from .conftest import Plane, serving
from .device import Device

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _made(folder: Path) -> ListenerTls:
    """Run `tls init` for a server on loopback."""
    run = CliRunner().invoke(main, ["tls", "init", str(folder), "127.0.0.1", "fleet.example"])
    assert run.exit_code == 0, run.output
    assert (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    return ListenerTls(str(folder / "127.0.0.1.pem"), str(folder / "127.0.0.1.key"))


async def test_a_device_gets_a_certificate_with_its_token(fleet_folder: Path, tmp_path: Path) -> None:
    """Over the control plane's own TLS. It is for clients only, and names tenant and device."""
    made = tmp_path / "tls"
    tls = _made(made)
    store = DeviceCertificate(tmp_path / "device-tls.pem", time.time)
    async with serving(fleet_folder, "", tls=tls, device_ca=made) as plane:
        assert plane.url.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=client_tls(TlsFiles(where="", ca_file=str(made / "ca.pem"))))
        async with aiohttp.ClientSession(connector=connector) as http:
            trusting = Plane(plane.plane, plane.url, http)
            device = await trusting.enrolled("kiosk-17")
            answer = await device.ask_token(certificate_request=store.request())
            store.store(answer.body["certificate"])
            assert (await device.ask_token()).body["certificate"] == ""
            await _refused_requests(device)
    assert store.path.stat().st_mode & 0o777 == 0o600
    certificate = x509.load_pem_x509_certificate(store.path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://stores/tenant/acme/device/kiosk-17"]
    _is_for_clients_only(store.path, made / "ca.pem", tls)
    assert store.request() == ""
    late = DeviceCertificate(store.path, lambda: time.time() + 0.6 * DEVICE_S)
    assert "CERTIFICATE REQUEST" in late.request()


def test_a_damaged_file_is_replaced_and_stops_nothing(tmp_path: Path) -> None:
    """Its certificate is valid, and its key is cut off."""
    _made(tmp_path)
    authority, store = Authority.load(tmp_path), DeviceCertificate(tmp_path / "device-tls.pem", time.time)
    store.store(authority.device("stores", "acme", "kiosk-17", store.request(), time.time()))
    assert store.request() == ""
    store.path.write_bytes(store.path.read_bytes()[:-90])
    assert "CERTIFICATE REQUEST" in store.request()
    own = str(store.path)
    assert client_tls(TlsFiles(where="clouds.main", cert_file=own, key_file=own, is_renewed=True)).fault == ""


async def _refused_requests(device: Device) -> None:
    """Requests that are malformed, for a key of another kind, or for another device's key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    other = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    unproven = bytearray(_signing_request().public_bytes(serialization.Encoding.DER))
    unproven[-1] ^= 1  # of the signature
    broken = x509.load_der_x509_csr(bytes(unproven))
    for request in ("hello", *(one.public_bytes(serialization.Encoding.PEM).decode() for one in (other, broken))):
        answer = await device.ask_token(certificate_request=request)
        assert (answer.status, answer.body["error"]["param"]) == (400, "certificate_request")


def _signing_request() -> x509.CertificateSigningRequest:
    key = ec.generate_private_key(ec.SECP256R1())
    return x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())


def _is_for_clients_only(device: Path, ca: Path, server: ListenerTls) -> None:
    """Verify both kinds with OpenSSL's rules of purpose."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server.cert_file, server.key_file)
    ours.load_verify_locations(ca)
    ours.verify_mode = ssl.CERT_REQUIRED
    theirs = ssl.create_default_context(cafile=ca)
    theirs.load_cert_chain(device)
    assert _handshake(theirs, ours, "127.0.0.1") == ""
    impostor = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    impostor.load_cert_chain(device)
    theirs.check_hostname = False
    assert "purpose" in _handshake(theirs, impostor, None)


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> str:
    """Return the client's or the server's fault; "" for none."""
    bios = [ssl.MemoryBIO() for _ in range(4)]
    ends = [
        client.wrap_bio(bios[0], bios[1], server_hostname=name),
        server.wrap_bio(bios[2], bios[3], server_side=True),
    ]
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error)
            bios[2].write(bios[1].read())
            bios[0].write(bios[3].read())
    return ""


async def test_a_fleet_without_a_ca_issues_no_certificates(fleet_folder: Path, tmp_path: Path) -> None:
    store = DeviceCertificate(tmp_path / "device-tls.pem", time.time)
    async with serving(fleet_folder, "") as plane:
        device = await plane.enrolled("kiosk-17")
        answer = await device.ask_token(certificate_request=store.request())
        assert (answer.status, answer.body["certificate"]) == (200, "")
    store.store("")
    assert not store.path.exists()


def test_certificates_are_made_once(tmp_path: Path) -> None:
    """A second run adds servers with the same CA, and overwrites nothing."""
    _made(tmp_path / "tls")
    ca = (tmp_path / "tls" / "ca.pem").read_bytes()
    again = CliRunner().invoke(main, ["tls", "init", str(tmp_path / "tls"), "127.0.0.1"])
    assert (again.exit_code, "already exists" in again.output) == (1, True)
    more = CliRunner().invoke(main, ["tls", "init", str(tmp_path / "tls"), "gateway.example"])
    assert (more.exit_code, (tmp_path / "tls" / "ca.pem").read_bytes()) == (0, ca)
    assert CliRunner().invoke(main, ["tls", "init", str(tmp_path / "tls"), "../x"]).exit_code == 2


def test_a_ca_whose_key_others_can_read_is_not_used(tmp_path: Path) -> None:
    _made(tmp_path / "tls")
    (tmp_path / "tls" / "ca.key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Authority.load(tmp_path / "tls")
    (tmp_path / "tls" / "ca.key").chmod(0o600)
    (tmp_path / "tls" / "ca.key").write_bytes((tmp_path / "tls" / "127.0.0.1.key").read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        Authority.load(tmp_path / "tls")


async def test_a_download_and_its_rest_come_over_tls(fleet_folder: Path, tmp_path: Path) -> None:
    made, name, content = tmp_path / "tls", "a" * 64, bytes(range(256)) * 20_000
    (fleet_folder / "published" / "blobs").mkdir()
    (fleet_folder / "published" / "blobs" / name).write_bytes(content)
    async with serving(fleet_folder, "", tls=_made(made)) as plane:
        trusting = client_tls(TlsFiles(where="", ca_file=str(made / "ca.pem")))
        for headers, first in (({}, 0), ({"Range": "bytes=3000000-"}, 3_000_000)):
            async with plane.http.get(f"{plane.url}/blobs/{name}", headers=headers, ssl=trusting) as response:
                assert await response.read() == content[first:]


async def test_plain_http_gets_nothing(fleet_folder: Path, tmp_path: Path) -> None:
    async with serving(fleet_folder, "", tls=_made(tmp_path / "tls")) as plane:
        port = int(plane.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
