"""Certificates made at test time: authorities, and what they issue, usable or not."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class Issued:
    """A certificate and its key, as PEM files."""

    def __init__(self, folder: Path, name: str, certificate: x509.Certificate, key: PrivateKey) -> None:
        self.cert, self.key, self.serial = folder / f"{name}.pem", folder / f"{name}.key", certificate.serial_number
        form, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
        self.key.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        self.cert.write_bytes(certificate.public_bytes(encoding))


class Authority:
    """A CA in a folder. `file`: its certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject("test CA " + name, "")
        certificate = _sign(self._builder(self._name, self._key, 0, 365, is_ca=True), self._key)
        self.file = Issued(folder, name, certificate, self._key).cert

    def issue(
        self,
        name: str,
        *,
        uri: str = "",
        organization: str = "",
        begins: float = -1,
        ends: float = 30,
        key: PrivateKey | None = None,
    ) -> Issued:
        """Issue a certificate for 127.0.0.1 and localhost. `begins`, `ends`: days from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        if uri:
            names.append(x509.UniformResourceIdentifier(uri))
        builder = self._builder(_subject(name, organization), key, begins, ends)
        return Issued(
            self._folder,
            name,
            _sign(builder.add_extension(x509.SubjectAlternativeName(names), critical=False), self._key),
            key,
        )

    def trust_but_revoke(self, revoked: Issued, path: Path) -> None:
        """Write the CA's certificate and a list that revokes a certificate into one file."""
        now = dt.datetime.now(dt.UTC)
        entry = x509.RevokedCertificateBuilder().serial_number(revoked.serial).revocation_date(now - _DAY).build()
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name).add_revoked_certificate(entry)
        crl = builder.last_update(now - _DAY).next_update(now + _DAY).sign(self._key, hashes.SHA256())
        path.write_bytes(self.file.read_bytes() + crl.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: PrivateKey, begins: float, ends: float, *, is_ca: bool = False
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=2)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        usage = x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins * _DAY)
            .not_valid_after(now + ends * _DAY)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(authority, critical=False)
            .add_extension(usage, critical=True)
        )


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _subject(common: str, organization: str) -> x509.Name:
    names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else []
    return x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def weak_key() -> rsa.RSAPrivateKey:
    """Return a key that is too short for today's servers."""
    return rsa.generate_private_key(public_exponent=65537, key_size=1024)
