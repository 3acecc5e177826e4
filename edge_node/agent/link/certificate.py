"""The device's certificate from its fleet, for TLS with the cloud that also gets the fleet's token.

    STATE_DIR/fleet/device-tls.pem      certificate and key, mode 0600

It lives for a day and is renewed with a token request once half of that is over, with a new key each time, which is
written together with its certificate.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.tls.contexts import read_certificate

from .identity import write_synced

log = logging.getLogger(__name__)

CERTIFICATE = "device-tls.pem"


class DeviceCertificate:
    """Owns the file at `path`."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._key: ec.EllipticCurvePrivateKey | None = None

    def request(self) -> str:
        """Return a signing request, as PEM; "" while the certificate is in the first half of its life."""
        try:
            certificate = read_certificate(self.path, "")
            begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
            if begins <= self._clock() < (begins + ends) / 2.0:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.path)
                return ""
        except (ConfigError, OSError):
            pass  # there is none yet, or its key is damaged
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))  # the fleet names the device
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()

    def store(self, certificate: str) -> None:
        """Write the certificate of the last request. A failure is logged: the next token request asks again."""
        key, self._key = self._key, None
        if not certificate or key is None:
            return
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            write_synced(self.path, certificate.encode() + private)
        except OSError as error:
            log.warning("The device's certificate cannot be written to %s: %s.", self.path, error.strerror)
