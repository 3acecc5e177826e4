"""Tokens that a request has cost upstream, counted until its last call has ended, also after its client has left.

Each call counts by itself, because a retry or another tier may ask for a sequence again: of these calls the
one that generated most is billed, or the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from causeway_server.router.types import Usage


class CallMeter:
    """One call for one sequence. `input_tokens` is 0 until the model has told it."""

    __slots__ = ("_on_end", "ended", "estimated_tokens", "input_tokens", "output_tokens")

    def __init__(self, estimated_tokens: int, on_end: Callable[[], None]) -> None:
        self.estimated_tokens = estimated_tokens  # of the prompt
        self.input_tokens = 0
        self.output_tokens = 0
        self.ended = False
        self._on_end = on_end

    def end(self) -> None:
        """Nothing more comes: the model has stopped, or nothing can be heard of it. Only the first call counts."""
        if not self.ended:
            self.ended = True
            self._on_end()


class SequenceMeter:
    """The calls for one sequence. `prompt`: the number of its prompt, which the choices to it share."""

    def __init__(self, prompt: int, on_end: Callable[[], None]) -> None:
        self.prompt = prompt
        self.calls: list[CallMeter] = []
        self._on_end = on_end

    def begin(self, estimated_tokens: int) -> CallMeter:
        """Return the meter of a new call. `estimated_tokens`: of the prompt, where the model tells no number."""
        call = CallMeter(estimated_tokens, self._on_end)
        self.calls.append(call)
        return call

    @property
    def billed(self) -> CallMeter:
        """The call that is billed; there is at least one."""
        return max(reversed(self.calls), key=lambda call: call.output_tokens)


class Consumption(msgspec.Struct, frozen=True):
    """What a request has cost. `estimated`: its prompt's tokens, or some of them, are an estimate."""

    usage: Usage = Usage()
    estimated: bool = False


class TokenMeter:
    """All sequences of one request."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceMeter] = {}
        self._listeners: list[Callable[[], None]] = []

    def sequence(self, number: int, prompt: int) -> SequenceMeter:
        """Return the meter of a sequence, the same one at each attempt."""
        return self._sequences.setdefault(number, SequenceMeter(prompt, self._check))

    @property
    def settled(self) -> bool:
        """Whether no call is in progress."""
        return all(call.ended for one in self._sequences.values() for call in one.calls)

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, now or when the last call in progress has ended."""
        if self.settled:
            listener()
        else:
            self._listeners.append(listener)

    async def wait(self) -> None:
        """Return when no call is in progress."""
        settled = asyncio.Event()
        self.on_settled(settled.set)
        await settled.wait()

    def consumption(self, *, abandoned: bool) -> Consumption:
        """Return what the request has cost so far.

        Args:
            abandoned: The client has left. Then a prompt costs its estimate where the model has told nothing;
                otherwise the upstream failed before it told anything, and the request costs nothing.
        """
        prompts: dict[int, tuple[int, bool]] = {}  # tokens, and whether they are an estimate
        output_tokens = 0
        for one in self._sequences.values():
            if not one.calls:
                continue
            call = one.billed
            output_tokens += call.output_tokens
            known = prompts.get(one.prompt)
            if call.input_tokens:
                prompts[one.prompt] = (call.input_tokens, False)
            elif known is None and (abandoned or call.output_tokens):
                prompts[one.prompt] = (call.estimated_tokens, True)
        usage = Usage(sum(tokens for tokens, _ in prompts.values()), output_tokens)
        return Consumption(usage, any(estimated for _, estimated in prompts.values()))

    def _check(self) -> None:
        if self._listeners and self.settled:
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener()
