"""An outbox of an application. `_sync/outbox.py` is generated from `_async/outbox.py`; edit only the latter."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Literal

from ..answers import Job
from ..connection import AsyncSleep, Deadline, async_sleep
from ..errors import CausewayAPIError, CausewayError, CausewayUnreachable
from ..outbox_file import OutboxFile, Submission
from ..request import Messages, RequestOptions
from .client import AsyncCauseway

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_UNAUTHORISED = (401, 403)
_KEY_IN_USE = "idempotency_conflict"
_LATER = (408, 425, 429)  # statuses of a temporary failure; the submission itself is valid


class AsyncOutbox:
    """Chat requests that an application submits while no daemon is running, in a SQLite file of its own.

    A submission survives restarts of application and daemon, becomes one job, and is kept until the application has
    read its result.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        causeway: AsyncCauseway,
        *,
        max_jobs: int = 10_000,
        clock: Callable[[], float] = time.time,
        sleep: AsyncSleep = async_sleep,
    ) -> None:
        """Open the file, or create it with access for its owner alone.

        Args:
            path: The file, for this application alone.
            causeway: The client of the device.
            max_jobs: Maximum number of submissions in the file.
            clock: Function that returns Unix seconds; for tests.
            sleep: Function that waits for a number of seconds; for tests.

        Raises:
            OutboxError: The file cannot be opened.
        """
        self._file = OutboxFile(path, max_jobs)
        self._causeway = causeway
        self._clock = clock
        self._sleep = sleep

    def submit(
        self,
        messages: Messages,
        *,
        priority: Literal["interactive", "standard", "bulk"] = "standard",
        key: str = "",
        **options: Unpack[RequestOptions],
    ) -> str:
        """Store a chat request on this application's disk; `send` passes it to the device.

        Args:
            messages: A text, or OpenAI's list of messages.
            priority: ``interactive`` jobs run first, ``bulk`` jobs last.
            key: Idempotency key, also of the job: a submission with the same key is the same one until its result is
                forgotten. After that, the same request without a deadline gets the earlier job's answer while the
                device keeps it; any other request ends as ``failed`` with the code ``idempotency_conflict``. Default: a
                new one.
            **options: See `RequestOptions`; `deadline_s` counts from now, by the wall clock.

        Returns:
            The key, under which `results` yields the result.

        Raises:
            OutboxError: The file cannot be written, or is full.
        """
        key = key or uuid.uuid4().hex
        deadline_s = options.pop("deadline_s", None)
        turns = messages if isinstance(messages, str) else [dict(turn) for turn in messages]
        arguments = {"messages": turns, "priority": priority, "options": options}
        self._file.add(key, arguments, None if deadline_s is None else self._clock() + deadline_s)
        return key

    async def send(self) -> int:
        """Send all waiting submissions to the device, oldest first. They keep waiting if the device is unreachable.

        Returns:
            The number of submissions that still wait.

        Raises:
            CausewayAPIError: The device rejects the API key.
            OutboxError: The file cannot be used.
        """
        waiting = self._file.waiting()
        for handed, submission in enumerate(waiting):
            if not await self._hand_over(submission):
                return len(waiting) - handed
        return 0

    async def results(self, *, timeout_s: float | None = None) -> AsyncIterator[tuple[str, Job]]:
        """Send all waiting submissions, and yield the key of each with its job when that has ended.

        A submission is forgotten when the next one is requested. An application that ends earlier gets it again.

        Args:
            timeout_s: Seconds to wait for all of them together; None for no limit.

        Raises:
            CausewayTimeout: Some jobs have not ended within `timeout_s`.
            CausewayAPIError: The device rejects the API key.
            OutboxError: The file cannot be used.
        """
        deadline = Deadline(timeout_s, time.monotonic)
        while True:
            await self.send()
            for submission in self._file.taken():
                job = await self._ended(submission)
                if job is not None:
                    yield submission.key, job
                    self._file.forget(submission.key)
                    deadline.restart()
            left = self._file.count()
            if not left:
                return
            await self._sleep(deadline.pause_s(f"{left} submissions"))

    def close(self) -> None:
        """Close the file; the client stays open."""
        self._file.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()

    async def _hand_over(self, submission: Submission) -> bool:
        """Submit a submission as a job, or record that it is refused permanently; return False if the device is
        unreachable.
        """
        key, left_s = submission.key, submission.stated_s
        if left_s is None and submission.deadline is not None:
            left_s = submission.deadline - self._clock()
            if left_s <= 0.0:
                message = "the deadline passed before the device could be reached"
                self._file.refuse(key, {"status": "expired", "error": message, "code": "deadline_exceeded"})
                return True
            # Before sending: if the response is lost, the retry must have the same body, because its key requires that.
            left_s = self._file.state(key, left_s)
        arguments = submission.arguments
        try:
            job = await self._causeway.submit(
                arguments["messages"],
                priority=arguments["priority"],
                key=key,
                **{**arguments["options"], "deadline_s": left_s},
            )
        except CausewayUnreachable:
            self._file.restate(key, submission.stated_s)
            return False
        except CausewayAPIError as error:
            if error.status in _UNAUTHORISED:
                raise
            if not 400 <= error.status < 500 or error.status in _LATER:  # below 400: a portal on the way answered
                return False
            self._file.refuse(key, {"status": "failed", "error": _reason(error, key), "code": error.code})
        except CausewayError:
            return False
        else:
            self._file.accept(key, job.id)
        return True

    async def _ended(self, submission: Submission) -> Job | None:
        """Return the job of a submission that has ended or was refused; None otherwise, or if the device is
        unreachable.
        """
        if submission.refusal is not None:
            refusal = submission.refusal
            return Job("", refusal["status"], error=refusal["error"], code=refusal["code"])
        try:
            job = await self._causeway.job(submission.job or "")
        except CausewayAPIError as error:
            if error.status in _UNAUTHORISED:
                raise
            if error.status != 404 or not error.code:  # without a code it is not the device's
                return None
            return Job(submission.job or "", "expired", error="the device no longer has this job", code=error.code)
        except CausewayError:
            return None
        return job if job.ended else None


def _reason(error: CausewayAPIError, key: str) -> str:
    if error.code != _KEY_IN_USE:
        return error.message
    return (
        f"the device still keeps a job that was submitted with the key {key!r} and another request or deadline: "
        f"submit with a new key ({error.message})"
    )
