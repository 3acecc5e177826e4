"""An answer that starts over, for a client that has its beginning: the same words are said once.

Greedy answers to one question mostly begin alike. Where the new one does not begin with what was said, or where more
than plain text was said, the stream is broken and says so: a client never gets two answers in one.
"""

from __future__ import annotations

import msgspec

from router.errors import StreamBroken
from router.types import Chunk


class EmittedPrefix:
    """What a client has, by choice."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._ended: set[int] = set()
        self._plain = True
        self._anything = False
        self._counted = False

    def note(self, chunk: Chunk) -> None:
        self._anything = True
        self._counted = self._counted or chunk.usage is not None
        if chunk.text:
            self._texts[chunk.index] = self._texts.get(chunk.index, "") + chunk.text
        if chunk.finish_reason is not None:
            self._ended.add(chunk.index)
        if chunk.tool_calls or chunk.logprobs or chunk.refusal is not None:
            self._plain = False

    def resume(self) -> ResumeFilter | None:
        """None where the client has nothing yet. Raises StreamBroken."""
        if not self._anything:
            return None
        if not self._plain:
            raise _broken()
        return ResumeFilter(dict(self._texts), frozenset(self._ended), counted=self._counted)


class ResumeFilter:
    """Leaves out of an answer what was said before: `texts` by choice, the choices that had `ended`, and the usage."""

    def __init__(self, texts: dict[int, str], ended: frozenset[int] = frozenset(), *, counted: bool = False) -> None:
        self._counted = counted
        self._left = texts
        self._ended = ended

    def take(self, chunk: Chunk) -> Chunk | None:
        """What of it is new; None for nothing. Raises StreamBroken."""
        if chunk.usage is not None:
            return None if self._counted else chunk
        left = self._left.get(chunk.index, "")
        if not left and chunk.index not in self._ended:
            return chunk
        common = min(len(left), len(chunk.text))
        if chunk.tool_calls or chunk.logprobs or chunk.refusal is not None or left[:common] != chunk.text[:common]:
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
    return StreamBroken("who made the answer died, and it cannot be continued. Ask again.", phase="stream")
