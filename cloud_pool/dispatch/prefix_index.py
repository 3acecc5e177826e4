"""Estimate of which endpoint has which beginnings of prompts in its KV cache, from the requests that were sent there.

A prompt's text is cut into blocks of BLOCK_CHARACTERS. A block's number is the hash of its text and of the number of
the block before it, so that equal numbers mean equal beginnings. An endpoint's newest blocks are kept, as many as its
KV cache has room for: it evicts the least recently used ones, too. No text is kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from causeway_server.router.types import Request

from ..upstreams.inference import BYTES_PER_TOKEN, InferenceRequest
from .config import KV_CACHE_TOKENS

BLOCK_CHARACTERS = 512
BLOCK_TOKENS = BLOCK_CHARACTERS // BYTES_PER_TOKEN
_MAX_BLOCKS = 100_000  # of an endpoint: about 20 MB
_MAX_CHARACTERS = 4 * 1024 * 1024  # of a prompt: what follows has no influence on the choice


def prompt_blocks(request: InferenceRequest) -> tuple[int, ...]:
    """Return the numbers of the blocks of a request's prompt; none for one that is not generated from a text."""
    if request.embed or request.part is not None:
        return ()
    if request.openai is not None:
        text = "".join(_pieces(request.openai))
    elif isinstance(request.prompt, str):
        text = request.prompt
    else:
        text = array("q", request.prompt).tobytes().decode("latin-1")
    number = hash((request.model, request.parameters.lora_name))
    bounds = pairwise(range(0, min(len(text), _MAX_CHARACTERS) + 1, BLOCK_CHARACTERS))
    return tuple([number := hash((number, text[start:end])) for start, end in bounds])


def _pieces(request: Request) -> Iterator[str]:
    """Yield a request's texts in the order in which templates render them. Lengths would differ before the texts."""
    if request.tools:
        yield _encoded(request.tools)
    for message in request.messages:
        yield f"\x00{message.role}\x00"
        if isinstance(message.content, str):
            yield message.content
        elif message.content is not None:
            yield from map(_encoded, message.content)
        if message.tool_calls or message.tool_call_id:
            yield _encoded((message.tool_calls, message.tool_call_id))
    for prompt in request.prompts:
        yield prompt if isinstance(prompt, str) else _encoded(prompt)


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


class PrefixIndex:
    """The blocks of a tier's endpoints. `max_tokens`: room of each one's KV cache."""

    def __init__(self, max_tokens: int = KV_CACHE_TOKENS) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        self._room: dict[str, int] = {}  # blocks, by the address of an endpoint that reports them
        self._blocks: dict[str, OrderedDict[int, None]] = {}  # by address; the most recently used block last

    def cached_tokens(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Return how many tokens of a prompt each endpoint has; endpoints that have none are left out.

        A block is always used with those before it, and before them, so that it is evicted first: bisection finds the
        last one.
        """
        found = {}
        for address, known in self._blocks.items():
            if count := bisect_left(blocks, True, key=lambda block: block not in known):
                found[address] = count * BLOCK_TOKENS
        return found

    def record(self, address: str, blocks: Sequence[int]) -> None:
        """Record that an endpoint gets a prompt."""
        known = self._blocks.setdefault(address, OrderedDict())
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        room = self._room.get(address, self._max_blocks)
        while len(known) > room:
            known.popitem(last=False)

    def set_room(self, address: str, tokens: int) -> None:
        """Set the room of an endpoint's KV cache, in tokens; 0: it is not known, and stays as it is."""
        if tokens:
            self._room[address] = min(tokens // BLOCK_TOKENS, _MAX_BLOCKS)

    def forget(self, address: str) -> None:
        """Forget the blocks and the room of an endpoint."""
        self._blocks.pop(address, None)
        self._room.pop(address, None)

    @property
    def blocks(self) -> Mapping[str, int]:
        """Number of blocks by address."""
        return {address: len(known) for address, known in self._blocks.items()}
