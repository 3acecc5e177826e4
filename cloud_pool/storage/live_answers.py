"""Unfinished answers in Redis: the text of running jobs, and answers that late parts may revise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from causeway_server.router.errors import CausewayError, DeadlineExceeded, RecordUnreadable
from causeway_server.router.jobs.job import RevisionDropped, encode_job_error
from causeway_server.router.serving.stored.ports import RunText
from causeway_server.router.types import Modality

from .config import JobsConfig
from .encryption import ContentCipher
from .record import ClaimedRevisions, LiveText, RevisableAnswer, RunBill, encode_bill, parse_record
from .redis_client import Argument, RedisClient, Reply, as_fields, as_int, as_list, as_text

_FOLLOWED_MS = 10_000
_TEXT_TTL_MS = 120_000
_TOO_LATE = encode_job_error(DeadlineExceeded("The worker was lost, and the part was not read in time."))
_LOST = encode_job_error(RevisionDropped("Every worker that read the part was lost."))


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
        """Return the text of the job's last run so far, of which `known` was read before.

        Raises ContentKeyMissing or RecordUnreadable, too.
        """
        start = f"({known.last}" if known.last else "-"
        for entry in as_list(await self._db.command("XRANGE", self._db.key("text", job), start, "+")):
            part, last = self.read(owner, job, entry), as_text(as_list(entry)[0])
            text = known.text if part.fence == known.run else ""
            text = text[: part.start] + part.text if part.start <= len(text) else text
            known = RunText(text, part.fence, last)
        return known


class AnswerRevisions:
    """Reports revisions, under the fence of the worker that has the answer; `JobStore.succeed` comes first.

    Every method raises JobStoreUnavailable while Redis does not answer. A report returns False if another worker has
    the answer, or if no revision is wanted any more; then nothing has changed, and the run is not billed.
    """

    def __init__(self, database: RedisClient, config: JobsConfig) -> None:
        self._db = database
        self._config = config
        self._lease_ms = int(config.lease_s * 1000)

    async def revise(
        self,
        job: str,
        fence: int,
        result: bytes,
        cache: str = "",
        *,
        left: Iterable[Modality] = (),
        bill: RunBill | None = None,
    ) -> bool:
        """Replace an answer. The other arguments are described at `JobStore.succeed`.

        Args:
            left: Kinds of part that may still revise the answer, under the next fence.
        """
        ttl_ms = int(self._config.result_ttl_s * 1000)
        arguments = (job, fence, ttl_ms, result, cache, encode_bill(bill), ",".join(left), self._lease_ms)
        return as_int(await self._db.run("revise", self._db.time, *arguments)) > 0

    async def drop(self, job: str, fence: int, error: CausewayError, *, bill: RunBill | None = None) -> bool:
        """Report that no further revision follows, with the reason. `bill`: bill of a failed run."""
        arguments = (job, fence, encode_job_error(error), encode_bill(bill))
        return as_int(await self._db.run("drop_revision", self._db.time, *arguments)) > 0

    async def claim(self, tiers: Iterable[str], limit: int) -> ClaimedRevisions:
        """Claim at most `limit` answers of these tiers whose workers are lost; expired ones are dropped."""
        bounds = (self._lease_ms, limit, self._config.max_attempts, _TOO_LATE, _LOST)
        rows, too_late, lost = as_list(await self._db.run("claim_revisions", self._db.time, *bounds, *tiers))
        flat, claimed = as_list(rows), []
        for row, left_ms in zip(flat[::2], flat[1::2], strict=True):
            fields = as_fields(row)
            try:
                claimed.append(RevisableAnswer(parse_record(fields), as_int(left_ms) / 1000.0))
            except RecordUnreadable as error:
                await self.drop(as_text(fields["id"]), as_int(fields["fence"]), error)
        return ClaimedRevisions(tuple(claimed), as_int(too_late), as_int(lost))
