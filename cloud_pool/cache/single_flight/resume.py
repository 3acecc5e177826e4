"""An answer that restarts, for a client that already has its beginning: the client gets the same text once.

Greedy answers to one question mostly begin alike. Where the new answer does not begin with the text that was sent, or
where more than plain text was sent, the stream ends with an error: a client never gets a mixture of two answers.
"""

from __future__ import annotations

import msgspec

from router.errors import StreamBroken
from router.types import Chunk


class EmittedPrefix:
    """What a client has already received, by choice."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._ended: set[int] = set()
        self._plain = True
        self._anything = False
        self._counted = False

    def add(self, chunk: Chunk) -> None:
        self._anything = True
        self._counted = self._counted or chunk.usage is not None
        if chunk.text:
            self._texts[chunk.index] = self._texts.get(chunk.index, "") + chunk.text
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
        if chunk.tool_calls or chunk.logprobs or chunk.reasoning or chunk.refusal is not None:
            self._plain = False

    def resume(self) -> ResumeFilter | None:
        """Return a filter for the restarted answer; None if the client has nothing yet. Raises StreamBroken."""
        if not self._anything:
            return None
        if not self._plain:
            raise _broken()
        return ResumeFilter(dict(self._texts), frozenset(self._ended), counted=self._counted)


class ResumeFilter:
    """Removes from an answer what was sent before: `texts` by choice, the ends of `ended` choices, and the usage."""

    def __init__(self, texts: dict[int, str], ended: frozenset[int] = frozenset(), *, counted: bool = False) -> None:
        self._counted = counted
        self._left = texts
        self._ended = ended

    def filter(self, chunk: Chunk) -> Chunk | None:
        """Return the part of the chunk that is new; None if nothing is. Raises StreamBroken."""
        if chunk.usage is not None:
            return None if self._counted else chunk
        left = self._left.get(chunk.index, "")
        if not left and chunk.index not in self._ended:
            return chunk
        common = min(len(left), len(chunk.text))
        other = chunk.tool_calls or chunk.logprobs or chunk.reasoning or chunk.refusal is not None
        if other or left[:common] != chunk.text[:common]:
            raise _broken()
        self._left[chunk.index] = left[common:]
        rest = msgspec.structs.replace(chunk, text=chunk.text[common:])
        if rest.finish_reason is not None and len(left) > common:
            raise _broken()
        if chunk.index in self._ended:
            if rest.text:
                raise _broken()
            return None
        return rest if rest.text or rest.finish_reason is not None else None


def _broken() -> StreamBroken:
    return StreamBroken(
        "The gateway that generated the answer died, and the answer cannot be continued. Send the request again.",
        phase="stream",
    )
