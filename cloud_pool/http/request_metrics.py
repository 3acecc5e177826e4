"""One request's measurements, recorded exactly once, whatever its outcome."""

from __future__ import annotations

from collections.abc import Callable

from router.types import Chunk, Usage

from ..cache.single_flight.reply import Reply
from ..observability.metrics import Metrics


class RequestMetrics:
    """Call `on_chunk` for each chunk, `stop` when the client has its answer or none, then `record`."""

    def __init__(self, metrics: Metrics, tier: str, arrived_at: float, clock: Callable[[], float]) -> None:
        self.tier = tier  # the requested tier, until the answering one is known
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._clock = clock
        self._stopped_at: float | None = None
        self._reported = Usage()
        self._tokens = 0
        self._first_token_at: float | None = None

    def first_token(self, tier: str) -> None:
        """Record the time to first token; only the first call counts."""
        if self._first_token_at is None:
            self.tier, self._first_token_at = tier or self.tier, self._clock()
            self._metrics.observe_first_token(self.tier, self._first_token_at - self._arrived_at)

    def on_chunk(self, reply: Reply, chunk: Chunk) -> None:
        if chunk.tokens:
            if self._first_token_at is None and reply.billable:
                self.first_token(self.tier)
            self._tokens += chunk.tokens
        if chunk.usage is not None:
            self._reported = chunk.usage

    def stop(self) -> None:
        self._stopped_at = self._clock()

    @property
    def usage(self) -> Usage:
        """The usage that the model reported; completion tokens are counted where it did not."""
        completion_tokens = self._reported.completion_tokens or self._tokens
        return Usage(self._reported.prompt_tokens, completion_tokens, self._reported.cached_tokens)

    def record(self, outcome: str, billed: Usage) -> None:
        """Record the outcome, exactly once. `billed`: the tier's usage that is billed to this request."""
        ended_at = self._clock() if self._stopped_at is None else self._stopped_at
        if self._first_token_at is not None and self._tokens > 1:
            self._metrics.observe_later_tokens(self.tier, ended_at - self._first_token_at, self._tokens - 1)
        seconds = ended_at - self._arrived_at
        self._metrics.observe_end(self.tier, outcome, seconds, billed.prompt_tokens, billed.completion_tokens)
