"""Answers in Redis that may be revised, because parts of their request are still being read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.errors import CausewayError, DeadlineExceeded, RecordUnreadable
from router.jobs.revisions import RevisionDropped
from router.jobs.view import encode_job_error
from router.types import Modality

from ..config import JobsConfig
from ..record import ClaimedRevisions, LateAnswer, RunBill, encode_bill, parse_record
from ..redis_client import RedisClient, as_fields, as_int, as_list, as_text

_TOO_LATE = encode_job_error(DeadlineExceeded("the worker was lost, and the part was not read in time"))
_LOST = encode_job_error(RevisionDropped("each worker that read the part was lost"))


class LateAnswers:
    """Reports of revisions, under the fence of the worker that has the answer. `JobStore.succeed` comes before.

    Every method raises JobStoreUnavailable while Redis does not answer. A report returns False if the answer is another
    worker's by now, or no revision is wanted any more; then nothing has changed, and the run is not billed.
    """

    def __init__(self, database: RedisClient, config: JobsConfig, clock: Callable[[], float]) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    @property
    def _now(self) -> int:
        return int(self._clock() * 1000)

    @property
    def _lease_ms(self) -> int:
        return int(self._config.lease_s * 1000)

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
        """Replace an answer; other arguments as `JobStore.succeed`.

        Args:
            left: kinds of part that may still revise it, under the next fence
        """
        ttl_ms = int(self._config.result_ttl_s * 1000)
        arguments = (job, fence, ttl_ms, result, cache, encode_bill(bill), ",".join(left), self._lease_ms)
        return as_int(await self._db.run("revise", self._now, *arguments)) > 0

    async def drop(self, job: str, fence: int, error: CausewayError, *, bill: RunBill | None = None) -> bool:
        """Report that no further revision follows, and why. `bill`: of a run that failed."""
        arguments = (job, fence, encode_job_error(error), encode_bill(bill))
        return as_int(await self._db.run("drop_revision", self._now, *arguments)) > 0

    async def claim(self, tiers: Iterable[str], limit: int) -> ClaimedRevisions:
        """Claim at most so many answers of these tiers whose worker is lost. Others are dropped: their time is over."""
        bounds = (self._lease_ms, limit, self._config.max_attempts, _TOO_LATE, _LOST)
        rows, too_late, lost = as_list(await self._db.run("claim_revisions", self._now, *bounds, *tiers))
        flat, claimed = as_list(rows), []
        for row, left_ms in zip(flat[::2], flat[1::2], strict=True):
            fields = as_fields(row)
            try:
                claimed.append(LateAnswer(parse_record(fields), as_int(left_ms) / 1000.0))
            except RecordUnreadable as error:
                await self.drop(as_text(fields["id"]), as_int(fields["fence"]), error)
        return ClaimedRevisions(tuple(claimed), as_int(too_late), as_int(lost))
