"""The device's identity in its fleet, on disk, with the device key, which never leaves the device; joining and leaving.

    STATE_DIR/fleet/identity.json   device, tenant, cohort, control plane, root metadata
    STATE_DIR/fleet/device.key      Ed25519, PEM, mode 0600

Commands that root runs on a state folder use the rights of the account that owns it: see `as_owner`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from causeway_server.router.bundle.manifest import Device, Name
from causeway_server.router.bundle.protocol import EnrolmentRequest, base64url, enrolment_proof
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import sync, write_atomically, write_new

from ... import daemon_version
from .control_plane import ControlPlane

log = logging.getLogger(__name__)

FOLDER, IDENTITY, KEY = "fleet", "identity.json", "device.key"
_VERSION = daemon_version()  # read before `as_owner`, whose account may not read Python's own files


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `identity.json`."""

    device: Device
    tenant: Name
    cohort: Name  # the cohort in the control plane's last response
    fleet: Name
    url: str  # the control plane's URL
    ca_file: str = ""  # PEM file of the authorities trusted for `url`; "" for the system's
    root: str  # the fleet's root metadata, on which the trust in updates is based
    joined: float  # Unix seconds


class DeviceKey:
    """The device key, in a file with mode 0600: Ed25519, raw in base64url without padding."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @property
    def public(self) -> str:
        return base64url(self._private.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> str:
        """Return the signature of `data`."""
        return base64url(self._private.sign(data))

    @classmethod
    def create(cls, path: Path) -> DeviceKey:
        """Create a key and write it, synced to disk. Raises OSError, also if the file exists."""
        private = Ed25519PrivateKey.generate()
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_new(path, pem, 0o600)
        sync(path.parent)
        return cls(private)

    @classmethod
    def load(cls, path: Path) -> DeviceKey:
        """Read a key. If other accounts could read the file, close it to them and log that. Raises FileNotFoundError;
        ConfigError if the file cannot be read, or is not an Ed25519 key.
        """
        try:
            if path.stat().st_mode & 0o077:
                log.warning(
                    "Other users could read %s; its mode is 0600 now. If they may have read the file, leave the "
                    "fleet and join it again.",
                    path,
                )
                path.chmod(0o600)
            private = load_pem_private_key(path.read_bytes(), password=None)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(error.strerror or str(error), where=str(path)) from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                "The device key is damaged. Leave the fleet and join it again.", where=str(path)
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError("The file is not an Ed25519 key. Leave the fleet and join it again.", where=str(path))
        return cls(private)


def open_key(folder: Path) -> DeviceKey:
    """Return the device's key from the fleet's folder. Raises FileNotFoundError or ConfigError."""
    return DeviceKey.load(folder / KEY)


def new_key(folder: Path) -> DeviceKey:
    """Return the key of an unfinished enrolment, or a new one. Raises ConfigError."""
    try:
        return open_key(folder)
    except FileNotFoundError:
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return DeviceKey.create(folder / KEY)
    except OSError as error:
        raise ConfigError(f"The device key cannot be written: {error.strerror}", where=str(folder)) from error


def read_identity(folder: Path) -> Identity | None:
    """Return the identity in the fleet's folder; None if the device never joined. Raises ConfigError."""
    path = folder / IDENTITY
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The identity is damaged ({error}). Leave the fleet and join it again.", where=str(path)
        ) from error


def write_identity(folder: Path, identity: Identity) -> None:
    """Write the identity, synced and by rename. Raises OSError."""
    write_synced(folder / IDENTITY, msgspec.json.format(msgspec.json.encode(identity)))


def write_synced(path: Path, content: bytes) -> None:
    """Replace a file by rename, with mode 0600, synced to disk. Raises OSError."""
    write_atomically(path, content, 0o600)
    sync(path.parent)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `causeway-edge fleet join`. `ca_file`: an absolute path; "" for the system's authorities."""

    url: str
    token: str
    ca_file: str = ""
    name: str = ""
    labels: Mapping[str, str] = {}
    site: str = ""


async def join(state_dir: Path, request: JoinRequest, now: float) -> Identity:
    """Create a key, enrol it and write the identity. `now`: Unix seconds.

    The call can be repeated after a failure: the key is kept, so that a lost response is sent again. Raises ConfigError
    if the device has joined before, or a file cannot be written; FleetError if the control plane refuses, or is
    unreachable.
    """
    folder = state_dir / FOLDER
    joined = read_identity(folder)
    if joined is not None:
        raise ConfigError(
            f"This device is already the device {joined.device} of the fleet {joined.fleet}. Leave that fleet first: "
            "`causeway-edge fleet leave`.",
            where=str(folder),
        )
    plane = ControlPlane(request.url, request.ca_file)
    key = new_key(folder)
    try:
        enrolment = await plane.enroll(
            EnrolmentRequest(
                token=request.token,
                public_key=key.public,
                proof=key.sign(enrolment_proof(request.token, key.public)),
                name=request.name,
                labels=dict(request.labels),
                site=request.site,
                daemon=_VERSION,
            )
        )
    finally:
        await plane.close()
    identity = Identity(
        device=enrolment.device,
        tenant=enrolment.tenant,
        cohort=enrolment.cohort,
        fleet=enrolment.fleet,
        url=request.url,
        ca_file=request.ca_file,
        root=enrolment.root,
        joined=now,
    )
    try:
        write_identity(folder, identity)
    except OSError as error:
        raise ConfigError(f"The identity cannot be written: {error.strerror}", where=str(folder)) from error
    return identity


def leave(state_dir: Path) -> None:
    """Remove identity, key, bundles and all other data of the fleet; the daemon must not run. Raises ConfigError."""
    folder, removed = state_dir / FOLDER, state_dir / f"{FOLDER}.left"
    try:
        shutil.rmtree(removed, ignore_errors=True)
        if folder.exists():
            folder.rename(removed)  # by rename: a crash cannot leave half of an identity
            shutil.rmtree(removed)
    except OSError as error:
        raise ConfigError(f"The folder cannot be removed: {error.strerror}", where=str(folder)) from error


@contextmanager
def as_owner(state_dir: Path) -> Iterator[Path]:
    """Yield the path under which to use `state_dir` in the block. No-op except for root on another account's folder.

    The daemon runs under an account of its own, and root joins or imports for it. A file that this account can write
    could be a link to a file of root's. With the account's rights, a command reaches only files that the account could
    reach anyway, and its new files belong to the account. The path uses a file descriptor: systemd keeps the folders of
    its accounts below one that they cannot enter. Raises OSError.
    """
    if os.geteuid() != 0 or not state_dir.exists() or (owner := state_dir.stat()).st_uid == 0:
        yield state_dir
        return
    folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    groups, group = os.getgroups(), os.getegid()
    try:
        os.setgroups([])
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
        yield Path(f"/proc/self/fd/{folder}")
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
        os.close(folder)
