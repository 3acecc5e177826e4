"""The operators' token of a process whose configuration names none: a file of mode 0600, made at the first start.

Loopback alone keeps no web page out, and no other account of the machine.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from router.errors import ConfigError

from .static_tokens import StaticToken, StaticTokens, hash_token

FILE = "operator-token"
_LEAST_CHARACTERS = 16
_MAX_BYTES = 4096
_log = logging.getLogger("causeway.cloud.operator")


def local_operator_token(folder: Path | None) -> StaticTokens:
    """Return the token of `folder`, and make it if there is none; several processes share it.

    Without a folder that can be written, no token is valid: operators' calls are refused until one is configured.

    Raises:
        ConfigError: the file holds no token: an empty one would let everybody in.
    """
    token = secrets.token_urlsafe(32)
    if folder is None:
        _log.warning("operators' calls are refused: set operator.token_file or state_dir")
    else:
        path = folder / FILE
        try:
            token = _read_or_make(path, token)
        except OSError as error:
            reason = error.strerror or str(error)
            _log.warning("operators' calls are refused, because %s: %s (state_dir, operator.token_file)", path, reason)
        else:
            _log.info("operators' calls need the token in %s, as `Authorization: Bearer TOKEN`", path)
    return StaticTokens((StaticToken("local", hash_token(token)),))


def _read_or_make(path: Path, token: str) -> str:
    """Raises OSError or ConfigError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        _write(path, f"{token}\n".encode())
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(file, 0o600)  # of a file that somebody made by hand
        found = os.read(file, _MAX_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(file)
    if len(found) < _LEAST_CHARACTERS:
        raise ConfigError("holds no token: remove it, and the next start makes a new one", where=str(path))
    return found


def _write(path: Path, content: bytes) -> None:
    """Write a file that no process sees half. Raises FileExistsError, which leaves the old one, or OSError."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as writer:
            writer.write(content)
            writer.flush()
            os.fsync(file)  # after a power cut an empty file would keep the gateway from starting
        os.link(part, path)
    finally:
        part.unlink()
