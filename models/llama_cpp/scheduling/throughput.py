"""How fast the engine is, and how many prompt tokens a step may prefill without a gap in running answers."""

from __future__ import annotations

_PREFILL_S = 0.02  # prefill per step while sequences are decoding: a reader sees no gap
_PREFILL_ALONE_S = 0.1  # prefill per step otherwise: a cancel still takes effect soon
_MIN_PREFILL = 32  # tokens per step
_WEIGHT = 0.3  # of the newest measurement in the prefill rate
_WINDOW_S = 1.0


class Throughput:
    """Rates over about the last second of work; idle time does not count."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._prefill_rate = _MIN_PREFILL / _PREFILL_S  # tokens/s; a guess that the first prompts correct
        self._tokens = self._steps = self._busy_s = 0.0

    def prefill_budget(self, decoding: int) -> int:
        """Return how many prompt tokens the next step may prefill beside `decoding` decoding sequences."""
        wanted = int(self._prefill_rate * (_PREFILL_S if decoding else _PREFILL_ALONE_S))
        return max(1, min(max(_MIN_PREFILL, wanted), self._batch_tokens - decoding))

    def record(self, step_s: float, sampled: int, decoding: int, prefilled: int, turns: int = 1) -> None:
        """Record a step.

        Args:
            step_s: its duration in seconds.
            sampled: tokens sampled, by all sequences together.
            decoding: sequences that were decoding.
            prefilled: prompt tokens in the batch.
            turns: groups of sequences that take turns: each gets this share of the steps.
        """
        self._busy_s += step_s
        self._tokens += sampled
        self._steps += max(1.0, sampled / decoding) / turns if decoding else 0.0
        if prefilled:
            self._prefill_rate += _WEIGHT * ((prefilled + decoding) / max(step_s, 1e-6) - self._prefill_rate)
        if self._busy_s > _WINDOW_S:
            # Halving ages old measurements without a list of them.
            self._busy_s, self._tokens, self._steps = self._busy_s / 2, self._tokens / 2, self._steps / 2

    @property
    def tokens_per_s(self) -> float:
        """All sequences together."""
        return self._tokens / self._busy_s if self._busy_s else 0.0

    @property
    def stream_tokens_per_s(self) -> float:
        """One sequence, which gets one token from each step that decodes."""
        return self._steps / self._busy_s if self._busy_s else 0.0
