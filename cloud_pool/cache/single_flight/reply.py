"""What becomes known about one request's answer: its source, its head, and whether it is billed to the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from router.types import Chunk, Usage

from ...core.request_context import AnswerHead
from ..store import CacheStatus
from .shared_generation import CoalescedSubscriber, GenerationUsage

STATUS_HEADER = "x-causeway-cache"
OnFirstToken = Callable[[str], None]
"""Gets the tier."""


class Reply:
    """One request's answer. Its properties are final from the first chunk on."""

    def __init__(self, on_first_token: OnFirstToken, status: CacheStatus | Literal[""] = "bypass") -> None:
        self.status: CacheStatus | Literal[""] = status  # "": there is no cache
        self._on_first_token = on_first_token
        self._subscriber: CoalescedSubscriber | None = None
        self._detached = True
        self._head = AnswerHead()

    @property
    def billable(self) -> bool:
        """Whether tokens were generated that are billed to this request."""
        return self._head.stale_s is None and (self._detached or self.usage is not None)

    @property
    def usage(self) -> GenerationUsage | None:
        """The usage of a shared generation that is billed to this request: it may outlast the request."""
        return None if self._subscriber is None else self._subscriber.usage

    @property
    def goes_on(self) -> bool:
        """Whether other requests wait for the generation that is billed to this one, which has left it."""
        if self._detached or self._subscriber is None:
            return False
        return bool(self._subscriber.generation.subscribers)

    @property
    def head(self) -> AnswerHead:
        """The answer's head with the cache's headers."""
        generation = None if self._detached or self._subscriber is None else self._subscriber.generation
        age_s = self._head.stale_s if generation is None or generation.cached_age_s is None else generation.cached_age_s
        age = () if age_s is None else (("age", str(int(age_s))),)
        return msgspec.structs.replace(self._head, headers=(*self._head.headers, (STATUS_HEADER, self.status), *age))

    def billed(self, reported: Usage) -> Usage:
        """Return the usage so far that is billed to this request. `reported`: what the answer itself reported."""
        usage = self.usage if self.billable else None
        return Usage() if not self.billable else reported if usage is None else usage.total

    def settle(self, reported: Usage, on_usage: Callable[[Usage], None]) -> bool:
        """Call `on_usage` exactly once with the usage that is billed to this request.

        Args:
            reported: what the answer itself reported.
            on_usage: called at once, or at the end of a generation that goes on for other subscribers.

        Returns:
            False if `on_usage` will be called later.
        """
        usage = self.usage if self.billable else None
        if usage is not None and not usage.ended:
            usage.on_end(on_usage)
            return False
        on_usage(self.billed(reported))
        return True

    def joined(self, subscriber: CoalescedSubscriber) -> None:
        """The request subscribed to a generation, perhaps to one of its own."""
        self._subscriber, self._detached, self.status = subscriber, False, "miss"

    def detached(self, *, resumed: bool) -> None:
        """The request is answered by itself: sharing failed, or is not allowed. `resumed`: it goes on in mid-answer."""
        self._detached = True
        if self._subscriber is not None and not resumed:
            self.status = "miss"

    def on_head(self, head: AnswerHead) -> None:
        self._head = head
        if head.stale_s is not None:
            self.status = "stale"

    def on_chunk(self, chunk: Chunk) -> None:
        """A chunk has come; the client may not have any yet."""
        if self._subscriber is not None and not self._detached:
            generation = self._subscriber.generation
            self.status = "miss" if self.usage else "coalesced" if generation.cached_age_s is None else "hit"
            self.on_head(generation.head or AnswerHead())
        if chunk.tokens and self.billable:
            self._on_first_token(self._head.model)
