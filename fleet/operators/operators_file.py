"""`operators.yaml` in the fleet's folder (optional): issuer, tokens, and the roles of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.documents.reader import read_struct
from causeway_server.router.errors import ConfigError

OPERATORS_FILE = "operators.yaml"
Role = Literal["viewer", "operator", "approver"]
RESERVED_NAMES = ("bootstrap", "controller")
"""Names of actors in the audit log that are programs. No operator or token may have them."""
MAX_NAME = 256
ROLES: tuple[Role, ...] = ("viewer", "operator", "approver")  # each may do what the one before may

Sha256Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", title="a sha256 in hex")]


class OidcDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An OpenID Connect issuer."""

    issuer: str
    client_id: str
    redirect: str
    client_secret_file: str = ""
    scope: str = "openid email profile"
    claim: str = "groups"
    name_claim: str = "email"


class TokenDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token of a program, such as CI."""

    sha256: Sha256Hex
    role: Role


class OperatorsDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    oidc: OidcDoc | None = None
    roles: dict[Role, tuple[str, ...]] = {}
    tokens: dict[str, TokenDoc] = {}


def read_operators(folder: Path) -> OperatorsDoc:
    """Read `operators.yaml`; without one, only the bootstrap token signs in. Raises ConfigError."""
    path = folder / OPERATORS_FILE
    if not path.exists():
        return OperatorsDoc(version=1)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path)) from error
    doc, _, problems = read_struct(text, str(path), OperatorsDoc)
    if doc is None:
        raise ConfigError(problems[0].message, where=str(problems[0].location))
    for name in doc.tokens:
        if name.casefold() in RESERVED_NAMES or not name or len(name) > MAX_NAME or not name.isprintable():
            raise ConfigError(
                f"{name!r} cannot name a token: {' and '.join(RESERVED_NAMES)} are reserved for the audit "
                f"log, and a name has 1 to {MAX_NAME} printable characters. Choose another.",
                where=str(path),
            )
    if doc.oidc is not None and not doc.roles:
        raise ConfigError("With `oidc`, `roles` must list the groups of each role.", where=str(path))
    if doc.oidc is not None and doc.oidc.client_secret_file:
        try:
            (folder / doc.oidc.client_secret_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"`oidc.client_secret_file`: {error}. Write the file.", where=str(path)) from error
    return doc


def role_of(doc: OperatorsDoc, values: frozenset[str]) -> Role | None:
    """Return the highest role that any value of a claim has."""
    for role in reversed(ROLES):
        named = frozenset(doc.roles.get(role, ()))
        if named & values or "*" in named:
            return role
    return None


class Operator(msgspec.Struct, frozen=True):
    """A signed-in operator. `name` is shown in the audit log."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)
