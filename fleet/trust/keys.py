"""Key files, and the roles of a fleet's keys.

Key files are Ed25519: PKCS#8 PEM with mode 0600, encrypted if there is a passphrase, and the public key beside them.
`trust.yaml` lists the keys of each role of a fleet, and the number of required signatures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta
from securesystemslib.signer import CryptoSigner, SSlibKey

from causeway_server.router.documents.reader import KeyLocations, read_struct
from causeway_server.router.documents.strict_yaml import Problem, SourceLocation
from causeway_server.router.errors import ConfigError
from causeway_server.router.numbers import seconds_of
from causeway_server.router.serving.folders import write_atomically, write_new

PRIVATE, PUBLIC = ".pem", ".pub"
TRUST_FILE = "trust.yaml"
OFFLINE, ONLINE = ("root", "artifacts"), ("rollout", "snapshot", "timestamp")
ROLES = (*OFFLINE, *ONLINE)
Expiry = Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}[hd]$", title="a time such as 12h, 7d or 365d")]
PublicKeys = Annotated[tuple[str, ...], Meta(min_length=1)]


class KeyInvalid(ConfigError, code="key_invalid"):
    """A key file is missing, malformed or readable by others, or its passphrase is wrong."""


class KeyFile(msgspec.Struct, frozen=True):
    """A public key in a folder. `private`: whether the private key is beside it."""

    name: str
    keyid: str
    private: bool


def new_key(folder: Path, name: str, passphrase: bytes | None) -> KeyFile:
    """Create a key pair: ``NAME.pem`` (private, 0600) and ``NAME.pub`` in `folder`, made with mode 0700.

    `passphrase` None: unencrypted. Raises FileExistsError, or OSError; no file is changed or left then.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder / (name + PUBLIC), folder / (name + PRIVATE)):
        if path.exists():
            raise FileExistsError(f"{path} already exists; nothing was written.")
    key = Ed25519PrivateKey.generate()
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_new(folder / (name + PRIVATE), private, 0o600)
    try:
        write_new(folder / (name + PUBLIC), public, 0o644)
    except OSError:
        (folder / (name + PRIVATE)).unlink()
        raise
    return KeyFile(name, SSlibKey.from_crypto(key.public_key()).keyid, private=True)


def list_keys(folder: Path) -> list[KeyFile]:
    """Return the keys of a folder, sorted by name. Raises KeyInvalid: a public key is malformed."""
    return [
        KeyFile(path.stem, read_public_key(path).keyid, path.with_suffix(PRIVATE).is_file())
        for path in sorted(folder.glob(f"*{PUBLIC}"))
    ]


def read_public_key(path: Path) -> SSlibKey:
    """Read a ``.pub`` file. Raises KeyInvalid: the file is missing, or not an Ed25519 public key in PEM."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise KeyInvalid(f"Cannot read the public key: {error.strerror}.", where=str(path)) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyInvalid("The file is not a public key in PEM.", where=str(path)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyInvalid("The file is not an Ed25519 key.", where=str(path))
    return SSlibKey.from_crypto(key)


def is_encrypted(path: Path) -> bool:
    """Return whether a private key file needs a passphrase. Raises KeyInvalid: the file cannot be read."""
    return b"ENCRYPTED" in _read_private(path)


def load_signer(path: Path, passphrase: bytes | None) -> CryptoSigner:
    """Read a private key. Raises KeyInvalid, also if others can read it."""
    try:
        key = serialization.load_pem_private_key(_read_private(path), passphrase or None)
    except TypeError as error:
        advice = "the key has no passphrase, but one was given" if passphrase else "the key needs its passphrase"
        raise KeyInvalid(advice, where=str(path)) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        message = "the passphrase is wrong, or the file is not a private key in PEM"
        raise KeyInvalid(message, where=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyInvalid("The file is not an Ed25519 key.", where=str(path))
    return CryptoSigner(key)


def _read_private(path: Path) -> bytes:
    if path.suffix == PUBLIC:
        raise KeyInvalid(f"The file is the public key. Sign with {path.with_suffix(PRIVATE).name}.", where=str(path))
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                message = (
                    f"readable by others (mode {mode:o}): run chmod 600, and make a new key if others use this machine"
                )
                raise KeyInvalid(message, where=str(path))
            return file.read(1 << 16)
    except OSError as error:
        raise KeyInvalid(f"Cannot read the private key: {error.strerror}.", where=str(path)) from error


class OfflineRoleDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role whose keys are kept offline by different persons."""

    keys: PublicKeys
    threshold: Annotated[int, Meta(ge=1)] = 2
    expires: Expiry = "365d"


class OnlineRoleDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role whose key is held by a server."""

    keys: PublicKeys
    expires: Expiry = "7d"


class TrustDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    root: OfflineRoleDoc
    artifacts: OfflineRoleDoc
    rollout: OnlineRoleDoc
    snapshot: OnlineRoleDoc
    timestamp: OnlineRoleDoc


class TrustedRole(msgspec.Struct, frozen=True):
    keys: tuple[SSlibKey, ...]
    threshold: int
    expires_s: float

    def expiry(self, now: datetime) -> datetime:
        """Return the expiry of metadata that is signed now, in whole seconds of UTC."""
        return (now.astimezone(UTC) + timedelta(seconds=self.expires_s)).replace(microsecond=0)


class Trust(msgspec.Struct, frozen=True):
    """The roles by name, and the names of the keys by keyid."""

    roles: Mapping[str, TrustedRole]
    names: Mapping[str, str]


def read_trust(folder: Path) -> tuple[Trust | None, tuple[Problem, ...]]:
    """Read the folder's `trust.yaml` and its public keys. Raise nothing: problems are returned."""
    path = folder / TRUST_FILE
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        message = "the file is missing. It names the keys that sign this fleet; docs/how-to/run-a-fleet.md shows one"
        return None, (Problem(SourceLocation(str(path)), message),)
    except OSError as error:
        return None, (Problem(SourceLocation(str(path)), error.strerror or str(error)),)
    doc, locations, problems = read_struct(text, str(path), TrustDoc)
    if doc is None:
        return None, problems
    keys, problems = _read_keys(folder, doc, locations)
    if not problems:
        problems = tuple(_rules(doc, keys, locations))
    if problems:
        return None, problems
    roles = {}
    for role in ROLES:
        part = _part(doc, role)
        seconds = seconds_of(part.expires)
        assert seconds is not None
        threshold = part.threshold if isinstance(part, OfflineRoleDoc) else 1
        roles[role] = TrustedRole(tuple(keys[key] for key in part.keys), threshold, seconds)
    return Trust(roles, {key.keyid: Path(name).stem for name, key in keys.items()}), ()


def write_holders(folder: Path, files: Sequence[Path], threshold: int) -> None:
    """Write `trust.yaml` again with other offline roles: `threshold` of the `.pub` files, which are copied to `keys`.

    Raises FileExistsError for another key of the name (nothing was changed), ConfigError if `trust.yaml` or a key is or
    would be invalid (only keys were copied), or OSError.
    """
    path = folder / TRUST_FILE
    doc, locations, problems = read_struct(path.read_text(encoding="utf-8", errors="replace"), str(path), TrustDoc)
    names = {file: f"keys/{file.name}" for file in files}
    for file, name in names.items():
        read_public_key(file)
        if not (folder / name).exists():
            write_new(folder / name, file.read_bytes(), 0o644)
        elif (folder / name).read_bytes() != file.read_bytes():
            raise FileExistsError(f"{folder / name} already exists with another key. Give {file} another name.")
    if doc is not None:
        roles = [
            msgspec.structs.replace(part, keys=tuple(names.values()), threshold=threshold)
            for part in (doc.root, doc.artifacts)
        ]
        doc = msgspec.structs.replace(doc, root=roles[0], artifacts=roles[1])
        keys, problems = _read_keys(folder, doc, locations)
        problems = problems or tuple(_rules(doc, keys, locations))
    if doc is None or problems:
        raise ConfigError(problems[0].message, where=str(problems[0].location))
    parts = {"version": doc.version} | {role: _part(doc, role) for role in ROLES}
    texts = {name: msgspec.json.format(msgspec.json.encode(part), indent=0) for name, part in parts.items()}
    write_atomically(path, "".join(f"{name}: {text.decode()}\n" for name, text in texts.items()).encode())


def _part(doc: TrustDoc, role: str) -> OfflineRoleDoc | OnlineRoleDoc:
    part: OfflineRoleDoc | OnlineRoleDoc = getattr(doc, role)
    return part


def _read_keys(folder: Path, doc: TrustDoc, locations: KeyLocations) -> tuple[dict[str, SSlibKey], tuple[Problem, ...]]:
    keys: dict[str, SSlibKey] = {}
    problems = []
    for role in ROLES:
        for index, name in enumerate(_part(doc, role).keys):
            try:
                keys[name] = read_public_key(folder / name)
            except KeyInvalid as error:
                problems.append(Problem(locations.find(f"{role}.keys[{index}]"), error.message))
    return keys, tuple(problems)


def _rules(doc: TrustDoc, keys: Mapping[str, SSlibKey], locations: KeyLocations) -> Iterator[Problem]:
    online = {keys[name].keyid for role in ONLINE for name in _part(doc, role).keys}
    for role in OFFLINE:
        part = _part(doc, role)
        held = {keys[name].keyid for name in part.keys}
        if isinstance(part, OfflineRoleDoc) and len(held) < part.threshold:
            message = f"needs {part.threshold} signatures, but lists only {len(held)} different keys"
            yield Problem(locations.find(role), message)
        if held & online:
            yield Problem(
                locations.find(f"{role}.keys"), "a key of an online role cannot be the key of an offline role, too"
            )
