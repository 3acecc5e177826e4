"""How fast the engine is, and how much prompt a step may take so that running answers keep flowing."""

from __future__ import annotations

_STEP_S = 0.02  # of prompt work in a step while answers are running: a reader sees no gap
_STEP_ALONE_S = 0.1  # with nobody waiting for a token: a cancel still takes effect soon
_FEWEST = 32  # tokens of prompt in a step
_WEIGHT = 0.3  # of the newest measurement
_WINDOW_S = 1.0


class Throughput:
    """Rates over about the last second of work; idle time does not count."""

    def __init__(self, batch_tokens: int) -> None:
        self._most = batch_tokens
        self._prompt_rate = _FEWEST / _STEP_S  # tokens/s; a guess that the first prompts correct
        self._tokens = self._steps = self._busy_s = 0.0

    def prompt_tokens(self, decoding: int) -> int:
        """The most prompt tokens that the next step should take beside `decoding` running answers."""
        wanted = int(self._prompt_rate * (_STEP_S if decoding else _STEP_ALONE_S))
        return max(1, min(max(_FEWEST, wanted), self._most - decoding))

    def note(self, step_s: float, answered: int, decoding: int, prompt: int) -> None:
        """A step took `step_s`: `answered` tokens were made by all, `decoding` rows and `prompt` tokens were run."""
        self._busy_s += step_s
        self._tokens += answered
        self._steps += 1 if decoding else 0
        if prompt:
            self._prompt_rate += _WEIGHT * ((prompt + decoding) / max(step_s, 1e-6) - self._prompt_rate)
        if self._busy_s > _WINDOW_S:
            # Halving forgets what is old without keeping a list of it.
            self._busy_s, self._tokens, self._steps = self._busy_s / 2, self._tokens / 2, self._steps / 2

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._busy_s if self._busy_s else 0.0

    @property
    def stream_tokens_per_s(self) -> float:
        """Of one answer: it gets one token in each step that decodes."""
        return self._steps / self._busy_s if self._busy_s else 0.0
