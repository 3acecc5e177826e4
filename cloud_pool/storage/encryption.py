"""Encryption of content in Redis, by a key file, in the form of `router.serving.at_rest`.

A value's place is its kind, its tenant and its id. Values written before encryption was turned on are returned
unchanged.

Each line of the key file is a key: its id, the time from which it seals (encrypts), and 32 bytes in base64. The newest
key whose time has come seals; every key can open (decrypt). The file is read again when it changes, and at once for an
unknown key.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from causeway_server.router.errors import ConfigError, JobStoreUnavailable
from causeway_server.router.serving.at_rest.sealing import KEY_BYTES, MAGIC, Sealer, key_id_of
from causeway_server.router.serving.folders import file_version, write_atomically

from .record import tenant_of

ContentKind = Literal["request", "result", "text", "file", "cached", "outcome"]
WHERE: Final = "jobs.encryption_key_file"
_LOOK_EVERY_S = 1.0  # at the file
_ID = re.compile(r"[a-z0-9]{1,32}")
log = logging.getLogger(__name__)


class ContentKeyMissing(JobStoreUnavailable, code="content_key_missing"):
    """Requests or results are encrypted with a key that this process does not have."""


class ContentKey(msgspec.Struct, frozen=True):
    """A key that seals values from `seals_from` (Unix time in seconds) on."""

    id: str
    seals_from: float
    secret: bytes

    @property
    def line(self) -> str:
        seals_from = datetime.fromtimestamp(self.seals_from, UTC).isoformat(timespec="seconds")
        return f"{self.id} {seals_from} {base64.b64encode(self.secret).decode()}\n"


class ContentCipher:
    """Cipher of stored values, by the key file `path`; "": none, values stay unencrypted. `clock`: Unix seconds."""

    def __init__(self, path: str = "", clock: Callable[[], float] = time.time) -> None:
        """Create the cipher, and read the keys. Raises ConfigError."""
        self._path = Path(path) if path else None
        self._clock = clock
        self._looked_at = clock()
        self._version = None if self._path is None else file_version(self._path)
        self._keys = () if self._path is None else read_keys(self._path)
        self._sealer = Sealer({key.id: key.secret for key in self._keys})

    @property
    def sealing_key(self) -> str:
        """Return the id of the key that seals now; "" if values are not sealed."""
        self._look(_LOOK_EVERY_S)
        if not self._keys:
            return ""
        now = self._clock()
        # Where the clock is behind and no key's time has come, the oldest one seals: most readers have it.
        return next((key.id for key in reversed(self._keys) if key.seals_from <= now), self._keys[0].id)

    def knows(self, key_id: str) -> bool:
        if key_id not in self._sealer:
            self._look(0.0)
        return key_id in self._sealer

    def seal(self, data: bytes, kind: ContentKind, owner: str, *name: str) -> bytes:
        """Seal a value and return the bytes to store. `owner`, `name` (of job or file, and part): its place."""
        key_id = self.sealing_key
        if not key_id:
            return data
        return self._sealer.seal(key_id, data, kind, tenant_of(owner), *name)

    def open(self, stored: bytes, kind: ContentKind, owner: str, *name: str) -> bytes:
        """Open a value that was sealed for the same place. Raises ContentKeyMissing or RecordUnreadable."""
        if not stored.startswith(MAGIC):
            return stored
        key_id = key_id_of(stored)
        if not self.knows(key_id):
            raise key_missing(key_id)
        return self._sealer.open(stored, kind, tenant_of(owner), *name)

    def _look(self, after_s: float) -> None:
        """Read the file again if it has changed. If it is invalid, the keys stay as they are."""
        now = self._clock()
        if self._path is None or 0.0 <= now - self._looked_at < after_s:
            return
        self._looked_at = now
        version = file_version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._path)
        except ConfigError as error:
            log.error("The encryption keys were not read again, so the previous keys stay in use: %s", error)
            return
        self._sealer = Sealer({key.id: key.secret for key in self._keys})


def key_missing(*key_ids: str) -> ContentKeyMissing:
    """Return the error for keys that are missing from the file."""
    named = ", ".join(key_id[:32] for key_id in key_ids)
    message = (
        f"Jobs are encrypted with a key that this process lacks ({named}). Give it the key file of "
        f"the other processes as {WHERE}."
    )
    return ContentKeyMissing(message, retry_after_s=30.0)


def read_keys(path: Path) -> tuple[ContentKey, ...]:
    """Return the keys of a file, oldest first. Raises ConfigError."""
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or 'The file is not ASCII'}.", where=WHERE
        ) from error
    keys = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"{path}: two keys have the same id.", where=WHERE)
    if not keys:
        raise ConfigError(f"{path} contains no key. Make a key with `causeway-cloud keys rotate {path}`.", where=WHERE)
    return tuple(sorted(keys, key=lambda key: key.seals_from))


def rotate_keys(path: Path, after_s: float, now: float) -> ContentKey:
    """Add a key to a file (mode 0600), which seals after `after_s`, the first one at once. Raises ConfigError."""
    known = read_keys(path) if path.exists() else ()
    key = ContentKey(secrets.token_hex(4), now + after_s if known else now, secrets.token_bytes(KEY_BYTES))
    try:
        write_atomically(path, "".join(each.line for each in (*known, key)).encode("ascii"), 0o600)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    return key


def _parse(line: str, where: str) -> ContentKey:
    """Parse a line. Raises ConfigError, which never quotes the line."""
    try:
        key_id, seals_from, text = line.split()
        secret = base64.b64decode(text, validate=True)
        at = datetime.fromisoformat(seals_from)
    except (ValueError, binascii.Error):
        raise ConfigError(
            f"{where}: a line must be `ID TIME KEY`, as `causeway-cloud keys rotate` writes it.", where=WHERE
        ) from None
    if not _ID.fullmatch(key_id) or len(secret) != KEY_BYTES or at.tzinfo is None:
        reason = f"{where}: an id consists of a-z and 0-9, a time has its zone, and a key has {KEY_BYTES} bytes"
        raise ConfigError(reason, where=WHERE)
    return ContentKey(key_id, at.timestamp(), secret)


NO_CIPHER: Final = ContentCipher()
