"""The key of Triton's model control: a caller without it cannot change what Triton serves.

Triton's port answers every caller. Loading a model with files of the caller's own is running code there, so the calls
that change or reveal what is served take a key in their metadata: our launcher gives it to Triton, and gateways and
workers send it. Inference, health and metadata need no key. See "Limit Endpoint Access" in Triton's
docs/customization_guide/inference_protocols.md.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.folders import write_new

RESTRICTED = ("model-repository", "model-config", "shared-memory", "statistics", "trace", "logging")
_NAME = "causeway"
HEADER = f"triton-grpc-protocol-{_NAME}"
_REFUSED = "protocol is restricted"
_MIN_LENGTH = 16


def default_key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's default key file, ``~/.local/state/causeway-triton/key``, or below $XDG_STATE_HOME."""
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/"), ".local", "state"))
    return Path(state, "causeway-triton", "key")


def ensure_key(path: Path) -> str:
    """Return the key in `path`, making one if there is none. Raises ConfigError, also if others can read it."""
    if path.exists():
        return read_key(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):  # Another launcher was faster.
            write_new(path, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)
    except OSError as error:
        raise ConfigError(
            f"The key of Triton's model control cannot be made: {error.strerror}. Name a file with --key-file.",
            where=str(path),
        ) from error
    return read_key(path)


def read_key(path: Path) -> str:
    """Return the key in `path`. Raises ConfigError."""
    try:
        with path.open(encoding="ascii") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            key = opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The key of Triton's model control cannot be read: {error}.", where=str(path)) from error
    if mode & stat.S_IROTH:
        raise ConfigError(
            "Every account can read the key of Triton's model control. Run `chmod o=` on the key file.", where=str(path)
        )
    if len(key) < _MIN_LENGTH or any(char in key for char in " \n:="):
        raise ConfigError(
            f"A key of Triton's model control has at least {_MIN_LENGTH} characters, and no space, `:` or `=`. Delete "
            "the file: `causeway-cloud triton` then makes a new key.",
            where=str(path),
        )
    return key


def restriction(key: str) -> str:
    """Return the command-line option that makes Triton require `key`."""
    return f"--grpc-restricted-protocol={','.join(RESTRICTED)}:{_NAME}={key}"


def is_refusal(details: str | None) -> bool:
    """Return whether an error's text says that a call lacked the right key; its status is UNAVAILABLE."""
    return _REFUSED in (details or "").lower()
