"""Authentication of every request: `Authorization` header to Principal; and static tokens of callers and operators.

0. A client certificate that names a device of `identity.certificates.tenants`, without a token: that device, with the
   scopes `static_scopes`, unless it is revoked. With a signed token, both must name the same device.
1. No tokens are configured (loopback only): ANYONE.
2. A bearer token that looks like a JWT, if keys or issuers are configured: signature, claims, revocation.
3. An API key (`cwk_…`), if they are accepted: its digest, expiry, revocation.
4. Any other bearer token: the static tokens, of the tenant `default`, with `static_scopes`.
5. A token of (2), (3) or (4) that is for other regions is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from causeway_server.router.errors import AuthenticationFailed, ConfigError
from causeway_server.router.serving.folders import write_new
from causeway_server.router.serving.issuers.claims import TokenIdentity
from causeway_server.router.serving.issuers.config import CLAIM_NAME
from causeway_server.router.serving.issuers.tokens import IssuerTokens
from causeway_server.router.serving.request import HttpExchange, client_certificate, read_credential
from causeway_server.router.serving.tls.peers import PeerCertificate

from ...core.principal import ANYONE, DEFAULT_TENANT, Grants, Principal
from .api_keys import PREFIX, ApiKeys
from .config import MAX_TOKEN_LIFETIME_S
from .revocation import RevocationList
from .token_verifier import TokenVerifier

CALLER_SCOPES = frozenset({"chat", "jobs"})
OPERATOR_SCOPES = frozenset({"admin"})
OPERATOR_TOKEN_FILE = "operator-token"
_MIN_CHARACTERS = 16
_MAX_BYTES = 4096
log = logging.getLogger(__name__)
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAME = re.compile(CLAIM_NAME)
_LISTS = ("models", "modalities", "regions")


class Authenticator(msgspec.Struct, frozen=True):
    """Authenticator of callers by static or signed tokens."""

    static: StaticTokens
    verifier: TokenVerifier | None = None  # None for static tokens only, as the next one
    revocations: RevocationList | None = None
    static_scopes: frozenset[str] = CALLER_SCOPES  # of each static token
    region: str = ""  # of this gateway
    certificate_tenants: Collection[str] = ()  # whose devices client certificates authenticate
    issuers: IssuerTokens[Principal] | None = None  # None: none are configured
    api_keys: ApiKeys | None = None  # None: none are accepted
    clock: Callable[[], float] = time.monotonic  # s
    wall_clock: Callable[[], float] = time.time  # unix, s

    def principal(self, authorization: str, certificate: PeerCertificate | None = None) -> Principal:
        """Return the caller. `certificate`: the verified one of its connection.

        Raises:
            AuthenticationFailed: The token is missing, invalid, expired or revoked, or not that of the certificate.
            IdentityUnavailable: The copy of the revocations is too old (`when_revocations_stale: deny`).
            PermissionDenied: The token is for other regions.
        """
        holder = None if certificate is None else self._holder(certificate)
        if holder is not None and not authorization:  # (0)
            if self.revocations is not None:
                self.revocations.check(holder.owner, holder.token_id, holder.issued)
            return holder
        signed = self.verifier is not None or self.issuers is not None or self.api_keys is not None
        if not (signed or self.static.known or self.certificate_tenants):  # (1)
            return ANYONE
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise AuthenticationFailed("Send `Authorization: Bearer <token>`.")
        principal = None if self.issuers is None else self.issuers.verify(authorization)
        if principal is None and self.verifier is not None and token.startswith("eyJ"):  # (2) `{"` in base64
            principal = self.verifier.verify(token, now=self.clock(), now_unix=self.wall_clock()).principal()
        if principal is not None:
            if self.revocations is not None:
                self.revocations.check(principal.owner, principal.token_id, principal.issued)
            if holder is not None and holder.owner != principal.owner:  # (0)
                raise AuthenticationFailed(
                    f"The token belongs to {principal.owner}, but the client certificate belongs to {holder.owner}."
                )
            principal.grants.require_region(self.region)  # (5)
            return principal
        if self.api_keys is not None and token.startswith(PREFIX):  # (3)
            principal = self.api_keys.principal(token)
            if self.revocations is not None:
                self.revocations.check(principal.owner, principal.token_id, principal.issued)
            principal.grants.require_region(self.region)
            return principal
        static = self.static.find(token)  # (4)
        static.grants.require_region(self.region)
        return Principal(DEFAULT_TENANT, static.device, self.static_scopes, static.grants)

    async def ready(self, authorization: str) -> None:
        """Wait for the keys of the token's issuer if it may have newer ones. Raises IdentityUnavailable."""
        if self.issuers is not None:
            await self.issuers.ready(authorization)

    def identify(self, http: HttpExchange) -> Principal:
        """Return the caller of a request. Raises like `principal`, and InvalidRequest for two credentials."""
        return self.principal(read_credential(http), client_certificate(http))

    def _holder(self, certificate: PeerCertificate) -> Principal | None:
        """Return the device that a certificate names; None if it names none of our tenants'.

        Raises AuthenticationFailed if it has expired since the connection was opened, or outlives its device's
        revocation.
        """
        if certificate.ends < self.wall_clock():
            raise AuthenticationFailed("The client certificate has expired. Connect again with a new certificate.")
        tenant, device = certificate.holder
        if tenant not in self.certificate_tenants or not _NAME.fullmatch(device):
            return None
        if certificate.ends - certificate.begins > MAX_TOKEN_LIFETIME_S:
            days = MAX_TOKEN_LIFETIME_S / 86400.0
            raise AuthenticationFailed(
                f"Revocations are kept for {days:.0f} days, but the client certificate is valid for longer. Use a "
                "certificate that is valid for a shorter time."
            )
        token_id = f"x509:{certificate.serial}"
        return Principal(tenant, device, self.static_scopes, token_id=token_id, issued=certificate.begins)

    def check_again(self, principal: Principal) -> None:
        """Check an accepted caller again while its answer is sent. Raises AuthenticationFailed if revoked."""
        if principal.token_id and self.revocations is not None:
            self.revocations.check_again(principal.owner, principal.token_id, principal.issued)


def principal_of(identity: TokenIdentity) -> Principal:
    """Return the caller whom an issuer's token names. No issuer makes operators of this gateway."""
    grants = Grants(priority=identity.priority, regions=identity.regions)
    scopes = identity.scopes & (CALLER_SCOPES | {"keys"})
    return Principal(identity.tenant, identity.device, scopes, grants, identity.token_id, identity.issued)


class StaticToken(msgspec.Struct, frozen=True):
    """A device, the hash of its token, and its grants."""

    device: str
    digest: bytes  # sha256, [32]
    grants: Grants = Grants()


class StaticTokens(msgspec.Struct, frozen=True):
    """All static tokens, by their hashes. If there are none, every caller on loopback is accepted."""

    known: tuple[StaticToken, ...] = ()

    def find(self, secret: str) -> StaticToken:
        """Return the entry of a bearer token. Raises AuthenticationFailed."""
        digest = hash_token(secret)
        matching: StaticToken | None = None
        for token in self.known:  # Compare with all of them: the time taken must not tell which one matches.
            if hmac.compare_digest(token.digest, digest):
                matching = token
        if matching is None:
            raise AuthenticationFailed("The bearer token is unknown.")
        return matching


def hash_token(secret: str) -> bytes:
    """Return the digest under which a token is stored."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def load_tokens(path: Path) -> StaticTokens:
    """Read a token file: one line per device, with its token and grants. Raises ConfigError, also for an empty file.

    kiosk-17  sha256:<64 hex digits>  priority=interactive
    kiosk-18  <token in the clear>  critical=true models=large,small
    # a comment
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path)) from error
    tokens = []
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if fields:
            tokens.append(_token(fields, f"{path}:{number}"))
    if not tokens:
        raise ConfigError("The token file contains no token.", where=str(path))
    return StaticTokens(tuple(tokens))


def _token(fields: Sequence[str], where: str) -> StaticToken:
    """Parse the fields of a line into a token. Raises ConfigError."""
    if len(fields) < 2:
        raise ConfigError("A line must be `<device> <token>` or `<device> sha256:<64 hex digits>`.", where=where)
    device, secret = fields[:2]
    hashed = _HASH.fullmatch(secret)
    if secret.startswith("sha256:") and not hashed:
        raise ConfigError("The prefix `sha256:` must be followed by 64 hex digits.", where=where)
    digest = bytes.fromhex(hashed[1]) if hashed else hash_token(secret)
    return StaticToken(device, digest, _grants(fields[2:], where))


def _grants(words: Sequence[str], where: str) -> Grants:
    """Parse the grants of a line. Raises ConfigError."""
    document: dict[str, object] = {}
    for word in words:
        name, is_grant, value = word.partition("=")
        if not is_grant or name in document:
            raise ConfigError(
                f"{word!r} is not a grant, or is written twice. After the token, write each grant once, such as "
                "priority=interactive.",
                where=where,
            )
        document[name] = value.split(",") if name in _LISTS else value
    try:
        return msgspec.convert(document, Grants, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=where) from error


def local_operator_token(folder: Path | None) -> StaticTokens:
    """Return the operators' token stored in `folder` (file mode 0600), creating it if needed; processes share it.

    Listening on loopback alone keeps out neither web pages nor other users. If the folder is not writable, operators'
    calls are refused until a token is configured. Raises ConfigError if the file holds no token, which would admit
    everybody.
    """
    token = secrets.token_urlsafe(32)
    if folder is None:
        log.warning(
            "Operators' requests are refused, because there is no operator token. Set operator.token_file or state_dir."
        )
    else:
        path = folder / OPERATOR_TOKEN_FILE
        try:
            token = _read_or_make(path, token)
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning(
                "The operator token %s cannot be used: %s. Operators' requests are refused. Set operator.token_file "
                "or a writable state_dir.",
                path,
                reason,
            )
        else:
            log.info("Operators' requests need the token in the file %s: send `Authorization: Bearer TOKEN`.", path)
    return StaticTokens((StaticToken("local", hash_token(token)),))


def _read_or_make(path: Path, token: str) -> str:
    """Return the token in the file, or create the file with `token`. Raises OSError or ConfigError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        write_new(path, f"{token}\n".encode(), 0o600)
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(file, 0o600)  # of a file that somebody made by hand
        stored = os.read(file, _MAX_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(file)
    if len(stored) < _MIN_CHARACTERS:
        raise ConfigError(
            "The file contains no token. Remove the file; the next start then creates a new token.", where=str(path)
        )
    return stored
