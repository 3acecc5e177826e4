"""`trust.yaml`: which keys hold which role of a fleet, and how many of them must sign."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from securesystemslib.signer import SSlibKey

from router.documents.quantities import seconds_of
from router.documents.reader import KeyLocations, read_struct
from router.documents.strict_yaml import Problem, SourceLocation

from .keys import KeyInvalid, read_public_key

TRUST_FILE = "trust.yaml"
OFFLINE, ONLINE = ("root", "artifacts"), ("rollout", "snapshot", "timestamp")
ROLES = (*OFFLINE, *ONLINE)

Expiry = Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}[hd]$", title="a time such as 12h, 7d or 365d")]
PublicKeys = Annotated[tuple[str, ...], Meta(min_length=1)]


class OfflineRoleDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role whose keys are kept apart, each by another person."""

    keys: PublicKeys  # paths of .pub files, relative to trust.yaml
    threshold: Annotated[int, Meta(ge=1)] = 2  # signatures that are needed
    expires: Expiry = "365d"


class OnlineRoleDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A role that a server holds."""

    keys: PublicKeys
    expires: Expiry = "7d"


class TrustDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    root: OfflineRoleDoc  # says who holds every role
    artifacts: OfflineRoleDoc  # signs bundles
    rollout: OnlineRoleDoc  # says which boxes run which signed bundle
    snapshot: OnlineRoleDoc
    timestamp: OnlineRoleDoc


class TrustedRole(msgspec.Struct, frozen=True):
    keys: tuple[SSlibKey, ...]
    threshold: int
    expires_s: float


class Trust(msgspec.Struct, frozen=True):
    """The roles by name, and the names of the keys by keyid."""

    roles: Mapping[str, TrustedRole]
    names: Mapping[str, str]


def read_trust(folder: Path) -> tuple[Trust | None, tuple[Problem, ...]]:
    """Read the folder's `trust.yaml` and the public keys that it names. Raises nothing."""
    path = folder / TRUST_FILE
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        message = "not there: it names the keys that sign this fleet; fleet/README.md shows one under `Sign it`"
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
            message = f"needs {part.threshold} signatures, but has {len(held)} different keys"
            yield Problem(locations.find(role), message)
        if held & online:
            yield Problem(locations.find(f"{role}.keys"), "a key of an online role cannot hold an offline one")
