"""The text of running jobs in Redis, for clients that follow their events."""

from __future__ import annotations

from collections.abc import Sequence

from ..encryption import ContentCipher, text_place
from ..record import LiveText
from ..redis_client import Argument, RedisClient, Reply, as_fields, as_int, as_list, as_text

_FOLLOWED_MS = 10_000
_TEXT_TTL_MS = 120_000


class LiveTexts:
    """Every method raises JobStoreUnavailable while Redis does not answer."""

    def __init__(self, database: RedisClient, cipher: ContentCipher) -> None:
        self._db = database
        self._cipher = cipher

    async def follow(self, job: str) -> None:
        """Have the worker of a job store the text of its runs, for 10 s."""
        await self._db.command("SET", self._db.key("followed", job), "", "PX", _FOLLOWED_MS)

    async def append(self, texts: Sequence[LiveText]) -> list[int]:
        """Append texts of running jobs. Returns how many characters of each run Redis has; -1: the job is another's."""
        flat: list[Argument] = []
        for each in texts:
            sealed = self._cipher.seal(each.text.encode(), *text_place(each.owner, each.job, each.fence, each.start))
            flat += [each.job, each.fence, each.start, each.end, sealed]
        return [as_int(stored) for stored in as_list(await self._db.run("append_text", _TEXT_TTL_MS, *flat))]

    def read(self, owner: str, job: str, entry: Reply) -> LiveText:
        """Return a part of a run's text from its entry in Redis. Raises ContentKeyMissing or RecordUnreadable."""
        entry_id, fields = as_list(entry)
        fence, values = int(as_text(entry_id).partition("-")[0]), as_fields(fields)
        start = int(values["from"])
        text = self._cipher.open(values["text"], *text_place(owner, job, fence, start))
        return LiveText(owner, job, fence, start, text.decode("utf-8", "replace"))
