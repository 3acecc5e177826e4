"""The keys of a device's state folder: its content is encrypted with data keys, and these with the owner's key.

`keys.json` in the folder has the data keys, oldest first, each encrypted with the owner's key, and a code (HMAC) under
that key, so that another key is noticed before anything is read or written. The owner's key is outside of the folder:

1. the systemd credential `causeway.state-key`, which may be bound to a TPM (`systemd-creds`),
2. else the file `encryption.key_file`, by default `<state_dir>.key` beside the folder. The first start of a new folder
   makes a missing file, with 32 random bytes.

Either is 32 bytes in base64, or a passphrase. The look-up key, with which names become keyed digests, and the keys that
are derived from it stay as long as the folder. Without `keys.json` the content is lost: see `erase`.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import xor
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...errors import ConfigError, RecordUnreadable
from ..folders import file_version, sync, write_atomically, write_new
from .sealing import KEY_BYTES, Sealer, head_of

FILE: Final = "keys.json"
CREDENTIAL: Final = "causeway.state-key"
LAYOUT: Final = 1
"""The `user_version` of a database whose rows are encrypted."""
_WHERE = "encryption.key_file"
_MIN_PASSPHRASE = 12
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 3, "maxmem": 64 << 20, "dklen": 64}  # OWASP's for 32 MiB
_VERSION_AT = 60  # of `user_version` in a database


class _DataKey(msgspec.Struct, frozen=True):
    id: str
    made: float  # Unix seconds
    sealed: bytes


class _Stored(msgspec.Struct, frozen=True):
    source: str  # file of the owner's key, or CREDENTIAL
    salt: bytes
    keys: tuple[_DataKey, ...]  # oldest first; the last one seals
    lookup: bytes
    code: bytes = b""


class _OpenKeys(NamedTuple):
    sealer: Sealer
    newest: str  # id of the key that seals
    lookup: bytes


class StateKeys:
    """The keys of one state folder, for all threads. `key_file`: the owner's key; "": the one of `keys.json`, or that
    beside the folder; `environ` names systemd's folder of credentials; `wall_clock`: Unix time, seconds.
    """

    def __init__(
        self,
        folder: Path,
        key_file: str = "",
        environ: Mapping[str, str] = os.environ,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder.absolute()
        self._path = self.folder / FILE
        self._key_file = key_file
        self._credentials = environ.get("CREDENTIALS_DIRECTORY", "")
        self._wall_clock = wall_clock
        self._lock = threading.RLock()
        self._version: tuple[int, int, int] | None = None
        self._stored: _Stored | None = None
        self._master = b""
        self._open: _OpenKeys | None = None

    # --- content -----------------------------------------------------------------------------------------------------

    def seal(self, data: bytes | str, *place: str | int) -> bytes:
        """Seal content for a place, such as its table and row. Raises OSError if there is no key."""
        keys = self._open or self._keys()
        return keys.sealer.seal(keys.newest, data.encode() if isinstance(data, str) else data, *map(str, place))

    def open(self, stored: object, *place: str | int) -> bytes:
        """Open content of a place. Return b"" if it was not sealed for it. Raises OSError if there is no key."""
        keys = self._keys()
        try:
            return keys.sealer.open(stored, *map(str, place)) if isinstance(stored, bytes) else b""
        except RecordUnreadable:
            return b""

    def reseal(self, stored: bytes, *place: str | int) -> bytes:
        """Return content under the newest key; unreadable content stays as it is."""
        data = self.open(stored, *place)
        return self.seal(data, *place) if data else stored

    def keyed(self, name: str | bytes) -> str | bytes:
        """Return the keyed digest by which a name is looked up: of text as text, of bytes as bytes; "" stays."""
        digest = hashlib.blake2b(
            name if isinstance(name, bytes) else name.encode(), key=self._keys().lookup, digest_size=16
        )
        return digest.digest() if isinstance(name, bytes) else digest.hexdigest() * bool(name)

    def derive(self, purpose: str) -> bytes:
        """Return a key for another purpose, which stays as long as the folder. Raises OSError."""
        key = self._keys().lookup
        return hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES, person=b"causeway key").digest()

    def check_made(self) -> None:
        """Read the keys, and make those of a new folder. Raises OSError."""
        self._known()

    def prepare(self) -> None:
        """Import what content needs, which takes a tenth of a second. Raises OSError."""
        self.seal(b"")

    # --- keys --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Read the folder's keys, which are made with the first content. Raises ConfigError if the owner's key is
        another one or missing; nothing was changed; OSError if they cannot be read.
        """
        self._load(make=False)

    @property
    def source(self) -> str:
        """The file of the owner's key, or CREDENTIAL."""
        if self._credential is not None:
            return CREDENTIAL
        return self._key_file or (f"{self.folder}.key" if self._stored is None else self._stored.source)

    @property
    def made(self) -> bool:
        """Whether the folder has keys."""
        return self._path.exists()

    @property
    def head(self) -> bytes:
        """The bytes with which content under the newest key begins. Raises OSError."""
        return head_of(self._known().keys[-1].id)

    @property
    def count(self) -> int:
        """The number of data keys: more than one until a rotation is complete. Raises OSError."""
        return len(self._known().keys)

    @property
    def age_s(self) -> float:
        """The age of the newest data key by the wall clock. Raises OSError."""
        return self._wall_clock() - self._known().keys[-1].made

    def rotate(self) -> None:
        """Add a data key, which seals from now on. Raises ConfigError or OSError."""
        with self._changing() as (stored, master):
            added = self._new_key(master)
            self._write(msgspec.structs.replace(stored, keys=(*stored.keys, added)), master)

    def retire(self) -> None:
        """Forget all data keys but the newest: nothing is sealed with them any more. Raises ConfigError or OSError."""
        with self._changing() as (stored, master):
            self._write(msgspec.structs.replace(stored, keys=stored.keys[-1:]), master)

    def change_owner(self, key_file: Path) -> None:
        """Seal the keys with another owner's key, whose file is made if missing. Raises ConfigError or OSError."""
        with self._changing() as (stored, master):
            secret = _secret_of(key_file) or _make_secret(key_file)
            salt = secrets.token_bytes(16)
            new = _master_of(secret, salt, str(key_file))
            keys = tuple(msgspec.structs.replace(key, sealed=_wrap(new, key.id, _wrap(master, key.id, key.sealed)))
                         for key in stored.keys)  # fmt: skip
            lookup = _wrap(new, "lookup", _wrap(master, "lookup", stored.lookup))
            self._write(_Stored(str(key_file.absolute()), salt, keys, lookup), new)

    def erase(self) -> None:
        """Make all content of the folder unreadable for ever: overwrite and remove its keys. Raises OSError."""
        with self._lock:
            if self._path.exists():
                with self._path.open("r+b", buffering=0) as file:
                    file.write(bytes(self._path.stat().st_size))
                    os.fsync(file.fileno())
                self._path.unlink()
                sync(self.folder)
            self._stored = self._open = None

    # --- the file ----------------------------------------------------------------------------------------------------

    def _load(self, *, make: bool) -> None:
        with self._lock:
            version = file_version(self._path)
            if self._stored is not None and version == self._version:
                return
            if version is None and not make:
                self._check_new()
                return
            stored = self._make() if version is None else self._read()
            self._use(stored, self._owner(stored))

    def _known(self) -> _Stored:
        """Return the keys, which are made for a new folder. Raises OSError."""
        if self._stored is None:
            try:
                self._load(make=True)
            except ConfigError as error:
                raise OSError(str(error)) from error
        assert self._stored is not None
        return self._stored

    def _keys(self) -> _OpenKeys:
        if (opened := self._open) is None:
            with self._lock:
                stored, master = self._known(), self._master
                sealer = Sealer({key.id: _wrap(master, key.id, key.sealed) for key in stored.keys})
                self._open = opened = _OpenKeys(sealer, stored.keys[-1].id, _wrap(master, "lookup", stored.lookup))
        return opened

    def _read(self) -> _Stored:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ConfigError(
                f"{self._path} is damaged, and the folder cannot be read without this file. Restore a copy of this "
                "file, or delete the files of the folder to begin again.",
                where=_WHERE,
            ) from None

    def _check_new(self) -> Path | None:
        """Check a folder without keys; return the owner's key file, None for the credential. Raises ConfigError."""
        sealed = next((path for path in sorted(self.folder.glob("*.sqlite")) if is_sealed(path)), None)
        if sealed is not None:
            raise ConfigError(
                f"{self._path} is missing, and {sealed.name} cannot be read without it. Restore a copy of the missing "
                "file, or delete the files of the folder to begin again.",
                where=_WHERE,
            )
        return None if self._credential else Path(self._key_file or f"{self.folder}.key").absolute()

    def _make(self) -> _Stored:
        """Make the keys of a folder, and the owner's key if there is none."""
        file = self._check_new()
        if file is not None and _secret_of(file) is None:
            _make_secret(file)
        stored = _Stored(CREDENTIAL if file is None else str(file), secrets.token_bytes(16), (), b"")
        master = self._owner(stored)
        lookup = _wrap(master, "lookup", secrets.token_bytes(KEY_BYTES))
        stored = msgspec.structs.replace(stored, keys=(self._new_key(master),), lookup=lookup)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):  # another process was faster
            write_new(self._path, _encode(stored, master), 0o600)
        sync(self.folder)  # before the first content
        return self._read()

    @property
    def _credential(self) -> Path | None:
        path = Path(self._credentials) / CREDENTIAL
        return path if self._credentials and path.is_file() else None

    def _owner(self, stored: _Stored) -> bytes:
        """Return the owner's key, 64 bytes. Raises ConfigError if it is missing, or is not that of `stored`."""
        beside = f"{self.folder}.key" if stored.source == CREDENTIAL else stored.source
        path = self._credential or Path(self._key_file or beside)
        secret = _secret_of(path)
        if secret is None:
            raise ConfigError(
                f"{self._path} is encrypted with a key that is not on this device: {path} does not exist. Restore the "
                f"key file, name its place with {_WHERE}, or give it as the credential {CREDENTIAL}. If this folder "
                "was copied from another device, delete the folder's files instead.",
                where=_WHERE,
            )
        master = _master_of(secret, stored.salt, str(path))
        if stored.keys and not hmac.compare_digest(_code(stored, master), stored.code):
            raise ConfigError(
                f"The key in {path} is not the key that encrypts {self._path}, or {self._path} was modified. Nothing "
                "was changed. Give the key of this folder; a folder of another device cannot be read on this device.",
                where=_WHERE,
            )
        return master

    def _use(self, stored: _Stored, master: bytes) -> None:
        self._stored, self._master, self._open, self._version = stored, master, None, file_version(self._path)

    @contextmanager
    def _changing(self) -> Iterator[tuple[_Stored, bytes]]:
        """Hold the file against other processes, and yield its content."""
        with self._lock:
            file = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._load(make=True)
                assert self._stored is not None
                yield self._stored, self._master
            finally:
                os.close(file)

    def _write(self, stored: _Stored, master: bytes) -> None:
        data = _encode(stored, master)
        write_atomically(self._path, data, 0o600)
        sync(self.folder)  # before content under a new key
        self._use(msgspec.json.decode(data, type=_Stored), master)

    def _new_key(self, master: bytes) -> _DataKey:
        key_id = secrets.token_hex(4)
        return _DataKey(key_id, self._wall_clock(), _wrap(master, key_id, secrets.token_bytes(KEY_BYTES)))


def is_sealed(path: Path) -> bool:
    """Return whether the rows of a database are encrypted, by its file alone, which a log may be ahead of."""
    with path.open("rb") as file:
        return file.read(_VERSION_AT + 4)[_VERSION_AT:] == LAYOUT.to_bytes(4, "big")


def _secret_of(path: Path) -> bytes | None:
    """Return the content of a key file; None if it is missing. Raises ConfigError."""
    try:
        return path.read_bytes().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", where=_WHERE) from error


def _make_secret(path: Path) -> bytes:
    """Make a key file with a random key, and return its content. Raises OSError."""
    secret = base64.b64encode(secrets.token_bytes(KEY_BYTES))
    try:
        write_new(path, secret + b"\n", 0o600)
        sync(path.parent)
    except FileExistsError:
        return path.read_bytes().strip()
    except OSError as error:
        reason = f"No key can be stored at {path} ({error.strerror}). Set {_WHERE} to a place outside the state folder"
        raise OSError(error.errno, reason) from error
    return secret


def _master_of(secret: bytes, salt: bytes, where: str) -> bytes:
    """Return the owner's key, 64 bytes, from 32 bytes in base64 or a passphrase. Raises ConfigError."""
    try:
        raw = base64.b64decode(secret, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) == KEY_BYTES:
        return hashlib.blake2b(salt, key=raw).digest()
    if len(secret) < _MIN_PASSPHRASE:
        reason = f"{where}: a passphrase has at least {_MIN_PASSPHRASE} characters. Or write `openssl rand -base64 32`"
        raise ConfigError(reason, where=_WHERE)
    return hashlib.scrypt(secret, salt=salt, **_SCRYPT)


def _wrap(master: bytes, name: str, key: bytes) -> bytes:
    """Encrypt or decrypt a key: XOR with a pad that no other name or salt has, and a code that authenticates it.
    AES-GCM would need `cryptography`, some megabytes, in a daemon that has no content yet.
    """
    pad = hashlib.blake2b(name.encode(), key=master[:KEY_BYTES], digest_size=KEY_BYTES, person=b"causeway wrap")
    return bytes(map(xor, key, pad.digest()))


def _code(stored: _Stored, master: bytes) -> bytes:
    content = msgspec.json.encode(msgspec.structs.replace(stored, code=b""))
    return hmac.digest(master[KEY_BYTES:], content, "sha256")


def _encode(stored: _Stored, master: bytes) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(stored, code=_code(stored, master)))
