"""Stored responses and conversations in Redis (`StateStore`), sealed as requests of jobs are.

A response of its own, or a conversation with its turns, is one hash, which expires as a whole. Beyond the tenant's
bounds those that expire first give way.
"""

from __future__ import annotations

from collections.abc import Sequence

from causeway_server.router.errors import BodyTooLarge, NotFound
from causeway_server.router.openai.responses.state import group_of

from .config import StoredResponsesConfig
from .encryption import ContentCipher
from .record import tenant_of, user_digest
from .redis_client import RedisClient, as_bytes, as_fields, as_int, as_list, as_text

_TURN = "t:"
_ORDER = 8  # digits before the content: its place in a conversation


class ResponseStore:
    """The store. Every method raises JobStoreUnavailable while Redis does not answer."""

    def __init__(self, database: RedisClient, config: StoredResponsesConfig, cipher: ContentCipher) -> None:
        self._db = database
        self._config = config
        self._cipher = cipher

    async def put(
        self, owner: str, name: str, data: bytes, *, private: bool, user: str, only_known: bool = False
    ) -> None:
        """Store an object, of which `user` is the end user. Raises BodyTooLarge. A gateway has no private ones."""
        assert not private
        config, place = self._config, group_of(name)
        content = self._cipher.seal(data, "request", owner, name)
        bounds = (int(config.ttl_s * 1000), config.max_responses, config.max_bytes, int(only_known))
        digest = user_digest(tenant_of(owner), user)
        reply = await self._db.run("response_put", self._db.time, owner, place, name, content, digest, *bounds)
        verdict = as_text(reply)
        if verdict == "too_large":
            raise BodyTooLarge(
                f"{place} is too large to be stored: at most {config.max_bytes} bytes (jobs.responses.max_bytes)."
            )
        if verdict == "absent":
            raise NotFound(f"{place} not found.")

    async def read(self, owner: str, names: Sequence[str]) -> list[bytes]:
        """Return objects, b"" for each that is not there. Raises ContentKeyMissing or RecordUnreadable."""
        rows = await self._db.commands(
            [("HMGET", self._db.key("response", group_of(name)), "owner", _TURN + name) for name in names]
        )
        found = []
        for name, row in zip(names, rows, strict=True):
            stored_owner, content = map(as_bytes, as_list(row))
            is_own = stored_owner == owner.encode()
            found.append(self._open(owner, name, content) if is_own and content else b"")
        return found

    async def read_group(self, owner: str, group: str) -> list[bytes]:
        """Return a conversation and its turns. Raises ContentKeyMissing or RecordUnreadable."""
        fields = as_fields(await self._db.command("HGETALL", self._db.key("response", group)))
        if fields.get("owner") != owner.encode():
            return []
        turns = [(content, name.removeprefix(_TURN)) for name, content in fields.items() if name.startswith(_TURN)]
        return [self._open(owner, name, content) for content, name in sorted(turns)]

    async def delete(self, owner: str, name: str) -> bool:
        """Delete an object, a conversation with its turns."""
        return as_int(await self._db.run("response_delete", owner, group_of(name), name)) > 0

    def _open(self, owner: str, name: str, content: bytes) -> bytes:
        return self._cipher.open(content[_ORDER:], "request", owner, name)
