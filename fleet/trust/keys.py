"""Ed25519 key files: PKCS#8 PEM with mode 0600, encrypted if there is a passphrase, and the public key beside them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from securesystemslib.signer import CryptoSigner, SSlibKey

from router.errors import ConfigError

from .files import write_new

PRIVATE, PUBLIC = ".pem", ".pub"


class KeyInvalid(ConfigError):
    """A key file is missing, malformed or readable by others, or its passphrase is wrong."""

    code = "key_invalid"


class KeyFile(msgspec.Struct, frozen=True):
    """A public key in a folder. `private`: the private key lies beside it."""

    name: str
    keyid: str
    private: bool


def new_key(folder: Path, name: str, passphrase: bytes | None) -> KeyFile:
    """Make a key pair: ``NAME.pem`` (private, 0600) and ``NAME.pub``.

    Args:
        folder: Made if it does not exist, with mode 0700.
        name: Of the key; the names of its files.
        passphrase: Encrypts the private key; None: unencrypted.

    Raises:
        FileExistsError: A key of this name is there; nothing was changed.
        OSError: It cannot be written, and is not there.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder / (name + PUBLIC), folder / (name + PRIVATE)):
        if path.exists():
            raise FileExistsError(f"{path} is there already; nothing was written")
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
    """Return the keys of a folder, sorted by name.

    Raises:
        KeyInvalid: A public key is malformed.
    """
    return [
        KeyFile(path.stem, read_public_key(path).keyid, path.with_suffix(PRIVATE).is_file())
        for path in sorted(folder.glob(f"*{PUBLIC}"))
    ]


def read_public_key(path: Path) -> SSlibKey:
    """Read a ``.pub`` file.

    Raises:
        KeyInvalid: Missing, or not an Ed25519 public key in PEM.
    """
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise KeyInvalid(f"cannot read the public key: {error.strerror}", where=str(path)) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyInvalid("not a public key in PEM", where=str(path)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyInvalid("not an Ed25519 key", where=str(path))
    return SSlibKey.from_crypto(key)


def is_encrypted(path: Path) -> bool:
    """Whether a private key file needs a passphrase.

    Raises:
        KeyInvalid: The file cannot be read.
    """
    return b"ENCRYPTED" in _read_private(path)


def load_signer(path: Path, passphrase: bytes | None) -> CryptoSigner:
    """Read a private key.

    Raises:
        KeyInvalid: Missing, malformed, readable by others than its owner, or the passphrase is wrong.
    """
    try:
        key = serialization.load_pem_private_key(_read_private(path), passphrase or None)
    except TypeError as error:
        advice = "the key has no passphrase, but one was given" if passphrase else "the key needs its passphrase"
        raise KeyInvalid(advice, where=str(path)) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        message = "the passphrase is wrong, or the file is not a private key in PEM"
        raise KeyInvalid(message, where=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyInvalid("not an Ed25519 key", where=str(path))
    return CryptoSigner(key)


def _read_private(path: Path) -> bytes:
    if path.suffix == PUBLIC:
        raise KeyInvalid(f"the public key; {path.with_suffix(PRIVATE).name} is the one that signs", where=str(path))
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                message = (
                    f"readable by others (mode {mode:o}): chmod 600, and make a new key if others used the machine"
                )
                raise KeyInvalid(message, where=str(path))
            return file.read(1 << 16)
    except OSError as error:
        raise KeyInvalid(f"cannot read the private key: {error.strerror}", where=str(path)) from error
