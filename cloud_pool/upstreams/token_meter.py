"""Count of the tokens that a request has used upstream, until its last call ends, even after its client has left.

Each call counts separately, because a retry or another tier may request a sequence again: of these calls the one that
generated most is billed, or the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from causeway_server.router.types import Usage


class CallMeter:
    """Count of one call for one sequence. `input_tokens` is 0 until the model has reported it."""

    __slots__ = ("_on_end", "ended", "estimated_tokens", "input_tokens", "output_tokens")

    def __init__(self, estimated_tokens: int, on_end: Callable[[], None]) -> None:
        self.estimated_tokens = estimated_tokens  # of the prompt
        self.input_tokens = 0
        self.output_tokens = 0
        self.ended = False
        self._on_end = on_end

    def end(self) -> None:
        """End the count: the model has stopped, or cannot be reached. Only the first call counts."""
        if not self.ended:
            self.ended = True
            self._on_end()


class SequenceMeter:
    """Meters of the calls for one sequence. `prompt`: number of its prompt, which its choices share."""

    def __init__(self, prompt: int, on_end: Callable[[], None]) -> None:
        self.prompt = prompt
        self.calls: list[CallMeter] = []
        self._on_end = on_end

    def begin(self, estimated_tokens: int) -> CallMeter:
        """Return the meter of a new call. `estimated_tokens`: tokens of the prompt, if the model reports no number."""
        call = CallMeter(estimated_tokens, self._on_end)
        self.calls.append(call)
        return call

    @property
    def billed(self) -> CallMeter:
        """The call that is billed; there is at least one."""
        return max(reversed(self.calls), key=lambda call: call.output_tokens)


class Consumption(msgspec.Struct, frozen=True):
    """Tokens used by a request. `estimated`: whether some of its prompt tokens are an estimate."""

    usage: Usage = Usage()
    estimated: bool = False


class TokenMeter:
    """Meters of all sequences of a request."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceMeter] = {}
        self._listeners: list[Callable[[], None]] = []

    def sequence(self, number: int, prompt: int) -> SequenceMeter:
        """Return the meter of a sequence, the same one at each attempt."""
        return self._sequences.setdefault(number, SequenceMeter(prompt, self._check))

    @property
    def settled(self) -> bool:
        """Whether no call is in progress."""
        return all(call.ended for sequence in self._sequences.values() for call in sequence.calls)

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, now or when the last call in progress has ended."""
        if self.settled:
            listener()
        else:
            self._listeners.append(listener)

    async def wait(self) -> None:
        """Wait until no call is in progress."""
        settled = asyncio.Event()
        self.on_settled(settled.set)
        await settled.wait()

    def consumption(self, *, abandoned: bool) -> Consumption:
        """Return the consumption of the request so far.

        Args:
            abandoned: Whether the client has left. Then a prompt without a reported number costs its estimate;
                otherwise the upstream failed before reporting, and the request costs nothing.
        """
        prompts: dict[int, tuple[int, bool]] = {}  # tokens, and whether they are an estimate
        output_tokens = 0
        for sequence in self._sequences.values():
            if not sequence.calls:
                continue
            call = sequence.billed
            output_tokens += call.output_tokens
            known = prompts.get(sequence.prompt)
            if call.input_tokens:
                prompts[sequence.prompt] = (call.input_tokens, False)
            elif known is None and (abandoned or call.output_tokens):
                prompts[sequence.prompt] = (call.estimated_tokens, True)
        usage = Usage(sum(tokens for tokens, _ in prompts.values()), output_tokens)
        return Consumption(usage, any(estimated for _, estimated in prompts.values()))

    def _check(self) -> None:
        if self._listeners and self.settled:
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener()
