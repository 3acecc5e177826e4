"""The tags that stand for names of sessions: jobs, batches and the items of live sessions keep them, as all tags."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from .errors import InvalidRequest

HEADER: Final = "x-session-id"
PREFIX: Final = "session:"
_DIGEST_BYTES: Final = 16
_MAX_NAME: Final = 256


def session_tag(name: str, kind: str = "") -> str:
    """Return the tag of a session's name, of which it has only a digest. `kind`: the name's source, "" the header."""
    return PREFIX + blake2b(f"{kind}\0{name}".encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).hexdigest()


def read_session(value: str | None) -> tuple[str, ...]:
    """Return the tag of the header `x-session-id`, () without the header. Raises InvalidRequest."""
    if value is None:
        return ()
    if not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise InvalidRequest(f"`{HEADER}` must have 1 to {_MAX_NAME} printable characters.", param=HEADER)
    return (session_tag(value),)


def tags_of_session(tags: Iterable[str]) -> tuple[str, ...]:
    """Return those of the tags that stand for a session: none, or one."""
    return tuple([tag for tag in tags if tag.startswith(PREFIX)][:1])
