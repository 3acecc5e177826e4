"""TLS contexts whose files may change while the process runs, and the checks of own certificates."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...config import ListenerTls
from ...errors import ConfigError
from ..folders import file_version

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

_CHECK_S = 1.0
HTTP1, HTTP2 = ("http/1.1",), ("h2",)


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files of a context.

    Attributes:
        ca_file: Trusted CAs. "": the system's for a client, no client certificates for a server. It may hold revocation
            lists (CRL), too; peers' certificates are then checked against them.
        is_renewed: The certificate is issued while the process runs: without a valid one there is none for the moment.
        cert_key, key_key, ca_key: Names of the configuration keys below `where`.
    """

    where: str  # configuration key of the section, for errors
    cert_file: str = ""  # own certificate, followed by those between it and the CA; "" for none
    key_file: str = ""  # private key of `cert_file`
    ca_file: str = ""
    is_renewed: bool = False
    cert_key: str = "cert_file"
    key_key: str = "key_file"
    ca_key: str = "ca_file"

    @property
    def paths(self) -> list[Path]:
        return [Path(file) for file in (self.cert_file, self.key_file, self.ca_file) if file]


class TlsContext(ssl.SSLContext):
    """A context whose handshakes use the files as they are now (1, 2). ConfigError names one that cannot be used."""

    files: TlsFiles  # the files
    fault: str  # why the files' last change is not in use; "" if it is

    def __init__(
        self, protocol: int, *, files: TlsFiles, alpn: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.files = files
        self.fault = ""
        self._server = protocol == ssl.PROTOCOL_TLS_SERVER
        self._alpn = list(alpn)
        self._clock = clock
        self._versions = self._read_versions()
        self._check_at = clock() + _CHECK_S
        self._made = self._make()

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **more: Any) -> ssl.SSLObject:
        return self.newest().wrap_bio(incoming, outgoing, *args, **more)

    def wrap_socket(self, *args: Any, **more: Any) -> ssl.SSLSocket:
        return self.newest().wrap_socket(*args, **more)

    def newest(self) -> ssl.SSLContext:
        """Return the context of the present files, or of the last usable ones."""
        now = self._clock()
        if now < self._check_at:
            return self._made
        self._check_at = now + _CHECK_S
        versions = self._read_versions()
        if versions == self._versions:
            return self._made
        try:
            self._made = self._make()
        except ConfigError as error:  # perhaps the files are being written; so the next check tries again
            if error.message != self.fault:
                log.error("The new certificates cannot be used, so the previous ones stay in use: %s", error.message)
            self.fault = error.message
            return self._made
        self._versions, self.fault = versions, ""
        log.info("%s: the certificates were read again.", self.files.where)
        return self._made

    def _read_versions(self) -> list[tuple[int, int, int] | None]:
        return [file_version(path) for path in self.files.paths]

    def _make(self) -> ssl.SSLContext:
        files = self.files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        if self._alpn:
            context.set_alpn_protocols(self._alpn)
        if files.ca_file:
            self._trust(context)
        elif not self._server:
            context.load_default_certs()
        if files.cert_file:
            try:
                check_certificate(files, time.time())
                _load_certificate(context, files)
            except ConfigError:
                if not files.is_renewed:
                    raise
        return context

    def _trust(self, context: ssl.SSLContext) -> None:
        where = f"{self.files.where}.{self.files.ca_key}"
        try:
            context.load_verify_locations(self.files.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"{self.files.ca_file} holds no PEM certificates of CAs.", where=where) from error
        except OSError as error:
            raise ConfigError(
                f"{self.files.ca_file} cannot be read: {error.strerror or error}.", where=where
            ) from error
        if not context.cert_store_stats()["x509_ca"]:
            raise ConfigError(f"{self.files.ca_file} holds no certificate of a CA.", where=where)
        if context.cert_store_stats()["crl"]:
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        context.verify_mode = ssl.CERT_REQUIRED


def server_tls(config: ListenerTls, where: str, alpn: Sequence[str] = HTTP1) -> TlsContext | None:
    """Return the context of a listener; None if its section `where` names no certificate. Raises ConfigError."""
    if not config.cert_file:
        if config.key_file or config.client_ca_file:
            raise ConfigError(
                "A listener with `key_file` or `client_ca_file` also needs its certificate: set `cert_file`.",
                where=f"{where}.cert_file",
            )
        return None
    if not config.key_file:
        raise ConfigError(
            "A listener with `cert_file` also needs the certificate's private key: set `key_file`.",
            where=f"{where}.key_file",
        )
    files = TlsFiles(
        where=where,
        cert_file=config.cert_file,
        key_file=config.key_file,
        ca_file=config.client_ca_file,
        ca_key="client_ca_file",
    )
    return TlsContext(ssl.PROTOCOL_TLS_SERVER, files=files, alpn=alpn)


def client_tls(files: TlsFiles, alpn: Sequence[str] = HTTP1) -> TlsContext:
    """Return the context of connections to another server. Raises ConfigError."""
    if bool(files.cert_file) != bool(files.key_file):
        raise ConfigError(
            f"Set `{files.cert_key}` and `{files.key_key}` together.", where=f"{files.where}.{files.cert_key}"
        )
    return TlsContext(ssl.PROTOCOL_TLS_CLIENT, files=files, alpn=alpn)


# --- own certificates ------------------------------------------------------------------------------------------------


def read_certificate(path: Path, where: str) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raises ConfigError."""
    from cryptography import x509  # on demand: 20 ms, and few processes have certificates

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.", where=where) from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no PEM certificate.", where=where) from error


def check_certificate(files: TlsFiles, now: float) -> float:
    """Check the dates of the own certificate (3); return the time at which it expires. Both times are Unix seconds.

    Raises:
        ConfigError: The file cannot be read, or the certificate is not valid now.
    """
    where = f"{files.where}.{files.cert_key}"
    certificate = read_certificate(Path(files.cert_file), where)
    begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    if now >= ends:
        raise ConfigError(
            f"The certificate in {files.cert_file} expired on {_date(ends)}: renew it, or correct this machine's "
            f"clock, which says {_date(now)}.",
            where=where,
        )
    if now < begins:
        raise ConfigError(
            f"The certificate in {files.cert_file} is not valid before {_date(begins)}: correct this machine's clock, "
            f"which says {_date(now)}, or issue the certificate again.",
            where=where,
        )
    return ends


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    where = f"{files.where}.{files.key_key}"
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password=_refuse_passphrase)
    except ssl.SSLError as error:
        if "TOO_SMALL" in (error.reason or "") or "TOO_WEAK" in (error.reason or ""):
            raise ConfigError(
                f"The key or the signature of the certificate in {files.cert_file} is too weak: issue it with a key "
                "of an elliptic curve such as P-256, or RSA with at least 2048 bits, and SHA-256.",
                where=f"{files.where}.{files.cert_key}",
            ) from error
        if error.reason == "KEY_VALUES_MISMATCH":
            message = (
                f"The private key in {files.key_file} does not belong to the certificate in {files.cert_file}: name "
                "the key that it was issued for."
            )
        else:
            message = f"{files.key_file} holds no PEM private key that can be used with {files.cert_file}."
        raise ConfigError(message, where=where) from error
    except OSError as error:
        raise ConfigError(f"{files.key_file} cannot be read: {error.strerror or error}.", where=where) from error
    except _PassphraseNeeded:
        raise ConfigError(
            f"{files.key_file} has a passphrase. Write the key without a passphrase, with mode 0600.", where=where
        ) from None


class _PassphraseNeeded(Exception):
    pass


def _refuse_passphrase() -> str:
    raise _PassphraseNeeded
