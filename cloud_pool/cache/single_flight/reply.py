"""What becomes known about one request's answer: where it came from, its head, and who pays for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from router.types import Chunk, Usage

from ...serving.request_context import AnswerHead
from ..metrics import CacheStatus
from .shared_generation import GenerationUsage, Subscriber

STATUS = "x-causeway-cache"
FirstToken = Callable[[str], None]
"""Is told the tier."""


class Reply:
    """One request's answer. What it says is true from the first chunk on."""

    def __init__(self, first_token: FirstToken, status: CacheStatus | Literal[""] = "bypass") -> None:
        self.status: CacheStatus | Literal[""] = status  # "": there is no cache
        self._first_token = first_token
        self._listener: Subscriber | None = None
        self._alone = True
        self._head = AnswerHead()

    @property
    def paid(self) -> bool:
        """Whether tokens were made on this request's account."""
        return self._head.stale_s is None and (self._alone or self.work is not None)

    @property
    def work(self) -> GenerationUsage | None:
        """What was made on this request's account and others may listen to: it may outlast the request."""
        return None if self._listener is None else self._listener.work

    @property
    def head(self) -> AnswerHead:
        """The answer's, with what the cache has to say."""
        generation = None if self._alone or self._listener is None else self._listener.generation
        age_s = self._head.stale_s if generation is None or generation.kept_s is None else generation.kept_s
        age = () if age_s is None else (("age", str(int(age_s))),)
        return msgspec.structs.replace(self._head, headers=(*self._head.headers, (STATUS, self.status), *age))

    def account(self, seen: Usage, told: Callable[[Usage], None]) -> bool:
        """Tells, once, what was made on this request's account. False: later, when it is all made, for others may still
        listen to it. `seen`: what the answer has said of itself."""
        work = self.work if self.paid else None
        if work is not None and not work.over:
            work.when_over(told)
            return False
        told(Usage() if not self.paid else seen if work is None else work.usage)
        return True

    def shared(self, subscriber: Subscriber) -> None:
        """Somebody's flight answers, perhaps this request's own."""
        self._listener, self._alone, self.status = subscriber, False, "miss"

    def alone(self, *, said: bool) -> None:
        """Nobody else's answer helped, or none may."""
        self._alone = True
        if self._listener is not None and not said:
            self.status = "miss"

    def begun(self, head: AnswerHead) -> None:
        self._head = head
        if head.stale_s is not None:
            self.status = "stale"

    def heard(self, chunk: Chunk) -> None:
        """A chunk is here; the client may have none yet."""
        if self._listener is not None and not self._alone:
            generation = self._listener.generation
            self.status = "miss" if self.work else "coalesced" if generation.kept_s is None else "hit"
            self.begun(generation.head or AnswerHead())
        if chunk.tokens and self.paid:
            self._first_token(self._head.tier)
