"""Join a fleet and leave it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from router.bundle.protocol import EnrolmentRequest, enrolment_proof
from router.errors import ConfigError

from ... import daemon_version
from .control_plane import ControlPlane
from .identity import FOLDER, Identity, new_key, read_identity, write_identity


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `causeway-edge fleet join`. `ca_file`: an absolute path, "": the system's authorities."""

    url: str
    token: str
    ca_file: str = ""
    name: str = ""
    labels: Mapping[str, str] = {}
    site: str = ""


async def join(state_dir: Path, request: JoinRequest, now: float) -> Identity:
    """Make a key, enrol it and write the identity. Repeat it after a failure: the key is kept, so that an answer that
    was lost is given again.

    Args:
        state_dir: The daemon's state folder.
        request: The control plane, the join token and the wanted name.
        now: Unix seconds.

    Raises:
        ConfigError: The box has joined before, or a file cannot be written.
        FleetError: The control plane refuses, or cannot be reached.
    """
    folder = state_dir / FOLDER
    joined = read_identity(folder)
    if joined is not None:
        raise ConfigError(
            f"this box is {joined.device} of the fleet {joined.fleet}: leave it first (causeway-edge fleet leave)",
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
                daemon=daemon_version(),
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
        raise ConfigError(f"the identity cannot be written: {error.strerror}", where=str(folder)) from error
    return identity


def leave(state_dir: Path) -> None:
    """Remove identity, key, bundles and all else of the fleet. The daemon must not run.

    Raises:
        ConfigError: A file cannot be removed.
    """
    folder, removed = state_dir / FOLDER, state_dir / f"{FOLDER}.left"
    try:
        shutil.rmtree(removed, ignore_errors=True)
        if folder.exists():
            folder.rename(removed)  # at once: a crash leaves no half of an identity
            shutil.rmtree(removed)
    except OSError as error:
        raise ConfigError(f"cannot be removed: {error.strerror}", where=str(folder)) from error
