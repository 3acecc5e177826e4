"""Unfinished answers in Redis: the text of running jobs."""

from __future__ import annotations

from collections.abc import Sequence

from causeway_server.router.serving.stored.ports import RunText

from .encryption import ContentCipher
from .record import LiveText
from .redis_client import Argument, RedisClient, Reply, as_fields, as_int, as_list, as_text

_FOLLOWED_MS = 10_000
_TEXT_TTL_MS = 120_000


class LiveTexts:
    """The texts of running jobs. Every method raises JobStoreUnavailable while Redis does not answer."""

    def __init__(self, database: RedisClient, cipher: ContentCipher) -> None:
        self._db = database
        self._cipher = cipher

    async def follow(self, job: str) -> None:
        """Make the job's worker store the text of its runs for 10 s."""
        await self._db.command("SET", self._db.key("followed", job), "", "PX", _FOLLOWED_MS)

    async def append(self, texts: Sequence[LiveText]) -> list[int]:
        """Append texts of running jobs. Return the length stored per run; -1: another worker has the job."""
        flat: list[Argument] = []
        for each in texts:
            sealed = self._cipher.seal(each.text.encode(), "text", each.owner, each.job, f"{each.fence}-{each.start}")
            flat += [each.job, each.fence, each.start, each.end, sealed]
        return [as_int(stored) for stored in as_list(await self._db.run("append_text", _TEXT_TTL_MS, *flat))]

    def read(self, owner: str, job: str, entry: Reply) -> LiveText:
        """Return a part of a run's text from its entry in Redis. Raises ContentKeyMissing or RecordUnreadable."""
        entry_id, fields = as_list(entry)
        fence, values = int(as_text(entry_id).partition("-")[0]), as_fields(fields)
        start = int(values["from"])
        text = self._cipher.open(values["text"], "text", owner, job, f"{fence}-{start}")
        return LiveText(owner, job, fence, start, text.decode("utf-8", "replace"))

    async def read_on(self, owner: str, job: str, known: RunText) -> RunText:
        """Return the last run's text after `known`. Raises ContentKeyMissing or RecordUnreadable, too."""
        start = f"({known.last}" if known.last else "-"
        for entry in as_list(await self._db.command("XRANGE", self._db.key("text", job), start, "+")):
            part, last = self.read(owner, job, entry), as_text(as_list(entry)[0])
            text = known.text if part.fence == known.run else ""
            text = text[: part.start] + part.text if part.start <= len(text) else text
            known = RunText(text, part.fence, last)
        return known
