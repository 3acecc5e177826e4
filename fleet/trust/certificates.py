"""The fleet's certificate authority: certificates of servers for a year, and of devices for a day.

    FOLDER/ca.pem, ca.key         the CA; the key, mode 0600, is needed by `causeway-fleet serve --device-ca` only
    FOLDER/NAME.pem, NAME.key     certificate and key of the server NAME

A server's certificate is good for servers only, and a device's for clients only, whose SPIFFE ID names its tenant and
device. A device's certificate is not revoked: it ends soon, and gateways refuse revoked devices by name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from causeway_server.router.errors import ConfigError, InvalidRequest
from causeway_server.router.serving.folders import write_new
from causeway_server.router.serving.tls.contexts import read_certificate
from causeway_server.router.serving.tls.peers import spiffe_id

CA, CA_KEY = "ca.pem", "ca.key"
DEVICE_S = 24 * 3600.0
_CA_DAYS, _SERVER_DAYS = 3650, 365
_EARLY = timedelta(minutes=5)  # for devices whose clocks are behind


def init(folder: Path, names: Sequence[str], now: float) -> list[Path]:
    """Make the CA unless the folder (made with mode 0700) has one, and certificates of servers; return the new files.

    Raises FileExistsError, without a change, for the certificate of a name, ConfigError for the CA, or OSError.

    Args:
        names: Host names and addresses of the servers, a certificate each.
        now: Unix seconds.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in names:
        if (folder / f"{name}.pem").exists():
            raise FileExistsError(f"{folder / name}.pem already exists; nothing was written.")
    made: list[Path] = []
    if not (folder / CA).exists():
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name("Causeway fleet CA")
        builder = _builder(subject, subject, key.public_key(), now, timedelta(days=_CA_DAYS))
        usage = _usage(ca=True)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        made += _write(folder, CA, CA_KEY, certificate, key)
    authority = Authority.load(folder)
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = authority.server(name, key.public_key(), now)
        made += _write(folder, f"{name}.pem", f"{name}.key", certificate, key)
    return made


class Authority:
    """A CA that issues certificates."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the CA of a folder. Raises ConfigError; also for a key that other accounts can read."""
        path = folder / CA_KEY
        certificate = read_certificate(folder / CA, str(folder))
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError("Other accounts can read the key file. Run chmod 600 on the file.", where=str(path))
            key = load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise ConfigError(error.strerror or str(error), where=str(path)) from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError("The file is not a PEM private key without a passphrase.", where=str(path)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"The key does not belong to the CA in {folder / CA}.", where=str(path))
        return cls(certificate, key)

    def server(self, name: str, key: ec.EllipticCurvePublicKey, now: float) -> x509.Certificate:
        """Return the certificate of a server. `name`: its host name or address; `now`: Unix seconds."""
        return self._issue(name, _host(name), key, now, timedelta(days=_SERVER_DAYS), ExtendedKeyUsageOID.SERVER_AUTH)

    def device(self, fleet: str, tenant: str, device: str, request: str, now: float) -> str:
        """Return a device's certificate for a signing request, both PEM; its names are ignored. `now`: Unix seconds.

        Raises InvalidRequest if it is malformed, not signed with its key, or that is not of the curve P-256.
        """
        try:
            asked = x509.load_pem_x509_csr(request.encode())
            key, is_proven = asked.public_key(), asked.is_signature_valid
        except (ValueError, UnsupportedAlgorithm) as error:
            raise InvalidRequest("The value is not a PEM signing request.", param="certificate_request") from error
        if not is_proven:
            raise InvalidRequest(
                "The signing request is not signed with its own key. Sign the request with the key that it contains.",
                param="certificate_request",
            )
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise InvalidRequest("The key must be of the curve P-256.", param="certificate_request")
        uri = x509.UniformResourceIdentifier(spiffe_id(fleet, tenant, device))
        lifetime = timedelta(seconds=DEVICE_S)
        certificate = self._issue(device, uri, key, now, lifetime, ExtendedKeyUsageOID.CLIENT_AUTH)
        return certificate.public_bytes(Encoding.PEM).decode()

    def _issue(
        self,
        subject: str,
        name: x509.GeneralName,
        key: ec.EllipticCurvePublicKey,
        now: float,
        lifetime: timedelta,
        use: x509.ObjectIdentifier,
    ) -> x509.Certificate:
        builder = _builder(_name(subject[:64]), self._certificate.subject, key, now, lifetime)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([name]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, lifetime: timedelta
) -> x509.CertificateBuilder:
    begins = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _EARLY)
        .not_valid_after(begins + lifetime)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(
    folder: Path, cert: str, key_name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    write_new(folder / key_name, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    write_new(folder / cert, certificate.public_bytes(Encoding.PEM), 0o644)
    return [folder / cert, folder / key_name]
