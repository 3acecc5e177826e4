"""Keys and revocations from a fleet's control plane, so that this gateway accepts the devices' tokens.

Both documents are read every `refresh_s` with their ETag:

    GET URL/.well-known/jwks.json   the keys that sign the devices' tokens
    GET URL/v1/revocations          tokens and devices that are refused before they expire

The keys are those of the last answer, so that a key which was removed there is refused here. Revocations are never
withdrawn: a control plane that was restored from an older backup hides nothing. While the control plane is away the
last copy stays in use, over a restart too with `copy_file`; the revocations then grow stale as Redis's do. The fleet's
keys cannot grant the scope `admin`.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio import to_thread
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from causeway_server.router.bundle.protocol import Revocations
from causeway_server.router.errors import AuthenticationFailed, ConfigError
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.issuers.documents import UNREADABLE, read_bounded, unreachable
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls

from .config import MAX_TOKEN_LIFETIME_S, FleetIdentityConfig
from .key_set import Jwks, parse_keys

if TYPE_CHECKING:
    import aiohttp

KEYS_PATH, REVOCATIONS_PATH = "/.well-known/jwks.json", "/v1/revocations"
REVOCATION_RETENTION_S = 600.0  # after a token's expiry: more than the largest `clock_skew_s`
DEVICE_RETENTION_S = MAX_TOKEN_LIFETIME_S + REVOCATION_RETENTION_S
_READ_S = 10.0
_KEEP_S = 15.0  # an unchanged copy on disk is written again after that time, so that a start finds it fresh
_MAX_KEYS_BYTES = 256 * 1024
_MAX_REVOCATIONS_BYTES = 64 * 1024 * 1024
log = logging.getLogger(__name__)


class RevocationSnapshot(msgspec.Struct, frozen=True):
    """A copy of the list. `epoch` and `version` are the highest seen so far: they never decrease."""

    epoch: int = 0
    version: int = 0
    tokens: Mapping[str, float] = {}  # jti -> unix time of its expiry
    devices: Mapping[str, float] = {}  # tenant/device -> unix time of the revocation

    @property
    def position(self) -> tuple[int, int]:
        """Position of the copy: epoch and version."""
        return self.epoch, self.version

    def check(self, owner: str, token_id: str, issued: float) -> None:
        """Check a token. Raises AuthenticationFailed if it or its device is revoked. `issued`: Unix time in seconds."""
        if token_id in self.tokens:
            raise AuthenticationFailed("The token has been revoked.")
        revoked_at = self.devices.get(owner)
        if revoked_at is not None and issued <= revoked_at:
            raise AuthenticationFailed("The device's tokens have been revoked.")

    def without(self, other: RevocationSnapshot, now: float) -> RevocationSnapshot:
        """Return the entries that `other` lacks, without those expired at `now` (Unix time in seconds)."""
        ends = now - REVOCATION_RETENTION_S / 2.0  # halfway: the writer's clock may be ahead of this one
        return RevocationSnapshot(
            tokens={jti: expiry for jti, expiry in self.tokens.items() if expiry > ends and jti not in other.tokens},
            devices={
                name: at
                for name, at in self.devices.items()
                if other.devices.get(name, float("-inf")) < at and at + MAX_TOKEN_LIFETIME_S > ends
            },
        )

    def merged_with(self, other: RevocationSnapshot, now: float) -> RevocationSnapshot:
        """Return the union with `other`, at the later position, without tokens long expired at `now` (Unix, s)."""
        devices = {
            name: max(self.devices.get(name, 0.0), other.devices.get(name, 0.0))
            for name in {**self.devices, **other.devices}
        }
        devices = {name: at for name, at in devices.items() if at > now - DEVICE_RETENTION_S}
        tokens = {
            jti: expiry
            for jti, expiry in {**self.tokens, **other.tokens}.items()
            if expiry > now - REVOCATION_RETENTION_S
        }
        return RevocationSnapshot(*max(self.position, other.position), tokens, devices)


class _Copy(msgspec.Struct, frozen=True):
    """The copy on disk."""

    keys: Jwks
    revocations: RevocationSnapshot = RevocationSnapshot()
    read_at: float = 0.0  # unix time, s; 0 in a copy of an older version


class FleetTrust:
    """The keys and revocations of a fleet's control plane. Raises ConfigError if `ca_file` cannot be used.

    `keys` maps each `kid` to its key; `revision` grows with every change of the keys. `last_error`: why the last
    refresh failed, "" if it succeeded. `clock`: monotonic seconds; `wall_clock`: Unix seconds.
    """

    def __init__(
        self,
        config: FleetIdentityConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._url = config.url.rstrip("/")
        self._clock = clock
        self._wall_clock = wall_clock
        self._tls = _tls_context(config)
        self._session: aiohttp.ClientSession | None = None
        self._etags: dict[str, str] = {}
        self._jwks: Jwks | None = None
        self._written: tuple[Jwks, RevocationSnapshot] | None = None
        self._kept_at = float("-inf")
        self.keys: Mapping[str, Ed25519PublicKey] = {}
        self.revision = 0
        self.revocations = RevocationSnapshot()
        self.read_at = float("-inf")  # monotonic s, both documents
        self.last_error = ""
        self._use_copy()

    async def watch(self) -> None:
        """Refresh every `refresh_s`, until cancelled."""
        while True:
            await self.refresh()
            await anyio.sleep(self._config.refresh_s)

    async def refresh(self) -> None:
        """Read what has changed. Errors are stored in `last_error`, never raised."""
        try:
            with anyio.fail_after(_READ_S):
                await self._read_revocations()
                await self._read_keys()
        except (*UNREADABLE, *unreachable(), ConfigError) as error:
            if not self.last_error:
                log.warning("Keys and revocations of the fleet at %s cannot be read: %s", self._url, error)
            self.last_error = str(error) or type(error).__name__
            return
        if self.last_error:
            log.info("Keys and revocations of the fleet at %s can be read again.", self._url)
        self.last_error = ""
        self.read_at = self._clock()
        await self._keep_copy()

    @property
    def has_copy(self) -> bool:
        """Whether keys and revocations were ever read, by this process or by the one that wrote `copy_file`."""
        return self._jwks is not None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # --- the documents -----------------------------------------------------------------------------------------------

    async def _read_keys(self) -> None:
        content = await self._get(KEYS_PATH, _MAX_KEYS_BYTES)
        if content is not None:
            self._use_keys(msgspec.json.decode(content, type=Jwks))

    def _use_keys(self, jwks: Jwks) -> None:
        """Replace the keys by those of `jwks`. Raises ConfigError if a key is invalid."""
        keys = parse_keys(jwks, f"{self._url}{KEYS_PATH}")
        if jwks != self._jwks:
            self._jwks, self.keys = jwks, keys
            self.revision += 1

    async def _read_revocations(self) -> None:
        content = await self._get(REVOCATIONS_PATH, _MAX_REVOCATIONS_BYTES)
        if content is not None:
            document = msgspec.json.decode(content, type=Revocations)
            devices = {name: at for name, at in document.devices.items() if self._is_own(name)}
            snapshot = RevocationSnapshot(document.epoch, document.version, document.tokens, devices)
            self.revocations = self.revocations.merged_with(snapshot, self._wall_clock())

    def _is_own(self, device: str) -> bool:
        """Return whether a device (`tenant/device`) belongs to one of the fleet's tenants; it can revoke no others."""
        return device.partition("/")[0] in self._config.tenants

    async def _get(self, path: str, limit_bytes: int) -> bytes | None:
        """Return the body; None if it has not changed. Raises ClientError, OSError, TimeoutError or ValueError."""
        import aiohttp

        if self._session is None:
            # Proxies of the environment are ignored and redirects are not followed: keys come from this host alone.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        headers = {"If-None-Match": self._etags[path]} if path in self._etags else {}
        async with self._session.get(self._url + path, headers=headers, allow_redirects=False) as response:
            if response.status == 304:
                return None
            if response.status != 200:
                raise ValueError(f"The request to {path} was answered with HTTP {response.status}.")
            body = await read_bounded(response, limit_bytes)
            if "ETag" in response.headers:
                self._etags[path] = response.headers["ETag"]
            return body

    # --- the copy ----------------------------------------------------------------------------------------------------

    def _use_copy(self) -> None:
        path = Path(self._config.copy_file)
        if not self._config.copy_file or not path.exists():
            return
        try:
            copy = msgspec.json.decode(path.read_bytes(), type=_Copy)
            self._use_keys(copy.keys)
        except (*UNREADABLE, OSError, ConfigError) as error:
            log.warning("%s: the copy of the fleet's keys cannot be read: %s", path, error)
            return
        self.revocations = copy.revocations
        self.read_at = self._clock() - max(0.0, self._wall_clock() - copy.read_at)

    async def _keep_copy(self) -> None:
        if not self._config.copy_file or self._jwks is None:
            return
        content, now = (self._jwks, self.revocations), self._clock()
        if content == self._written and now - self._kept_at < _KEEP_S:
            return
        copy = _Copy(*content, self._wall_clock())
        try:
            await to_thread.run_sync(write_atomically, Path(self._config.copy_file), msgspec.json.encode(copy))
        except OSError as error:
            log.warning("%s: the copy of the fleet's keys cannot be written: %s", self._config.copy_file, error)
            return
        self._written, self._kept_at = content, now


def _tls_context(config: FleetIdentityConfig) -> ssl.SSLContext | bool:
    """Build the TLS context. Raises ConfigError if `ca_file` cannot be used."""
    if not config.ca_file:
        return True
    return client_tls(TlsFiles(where="identity.fleet", ca_file=config.ca_file))
