"""Tiers whose Triton says what a test wants; doors, ladder and service are the real ones."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import anyio
from cryptography.fernet import Fernet, MultiFernet

from cloud_pool.admission import Admission, Priority
from cloud_pool.call import Call, Head
from cloud_pool.config import TierConfig
from cloud_pool.ladder.continuing import Continuing
from cloud_pool.ladder.ladder import Ladder, Sense
from cloud_pool.ladder.settings import LadderConfig
from cloud_pool.service import Kept, Lane, Service
from cloud_pool.tensors import Ask, Delta
from cloud_pool.tiers import Tier, Wording
from models.spec import Answers
from router.types import Chunk, Message, Request

CHAT = Request(kind="chat", model="large", messages=(Message("user", "tell me"),), max_tokens=100)
WORDS = ("one ", "two ", "three ", "four ", "five ", "six ")


class Hung:
    """In a script: wait for ever."""


class Triton:
    """Says `script`, one delta a word; an exception in it is raised. Speaks on from where a prompt ends."""

    def __init__(self, *script: str | Exception | type[Hung]) -> None:
        self.script = script or WORDS
        self.asked: list[Ask] = []
        self.open = 0
        self.hangs = anyio.Event()

    async def generate(self, ask: Ask, key: bytes = b"", *, hedged: bool = True) -> AsyncGenerator[Delta, None]:
        self.asked.append(ask)
        self.open += 1
        try:
            said = ask.prompt.partition("tell me|")[2]
            made = 0
            for word in self.script:
                if isinstance(word, Exception):
                    raise word
                if not isinstance(word, str):
                    self.hangs.set()
                    await anyio.sleep_forever()
                elif said.startswith(word):
                    said = said.removeprefix(word)
                else:
                    made += 1
                    reason = "length" if made == ask.parameters.max_tokens else None
                    yield Delta((word,), (reason,), (1,), ((),), 3, reason is not None)
                    if reason:
                        return
            yield Delta(("",), ("stop",), (0,), ((),), 3, True)
        finally:
            self.open -= 1


class Health:
    healthy = 1


class Pressure:
    """What the ladder reads of a door; the door itself is real."""

    saturated = False
    queue_s = 0.0
    running = 0
    limit = 10
    held_s: float | None = None

    def queue_seconds(self, priority: Priority) -> float:
        return self.queue_s


class Bed:
    def __init__(
        self,
        tritons: dict[str, Triton],
        *,
        places: int = 4,
        queue: int = 0,
        objective_s: float = 0.0,
        partial_tokens: int = 2,
        answers: Answers = "text",
        stale: Callable[[Request, str], Awaitable[Kept | None]] | None = None,
    ) -> None:
        self.tritons = tritons
        names = tuple(tritons)
        wording = Wording("{% for m in messages %}{{ m.content }}{% endfor %}|", context_tokens=1000, answers=answers)
        self.tiers = {name: Tier(TierConfig(name=name, template_file="x"), wording) for name in names}
        self.doors = {name: Admission(places, queue) for name in names}
        self.health = {name: Health() for name in names}
        self.pressure = {name: Pressure() for name in names}
        config = LadderConfig(tiers=names, patience=1.0, partial_tokens=partial_tokens)
        senses = {name: Sense(self.health[name], self.pressure[name], objective_s) for name in names}
        self.now = 1000.0  # of the ladder; deadlines are real
        self.ladder = Ladder(config, senses, clock=lambda: self.now)
        self.continuing = Continuing(MultiFernet([Fernet(Fernet.generate_key())]), 60.0)
        more = {} if stale is None else {"stale": stale}
        lanes = {name: Lane(self.tiers[name], self.doors[name], tritons[name]) for name in names}
        self.service = Service(lanes, self.ladder, continuing=self.continuing, **more)

    def call(self, request: Request = CHAT, *, deadline_s: float = 60.0, tenant: str = "acme", **more: object) -> Call:
        tier = self.tiers[request.model]
        return Call(id="r", request=request, tier=tier, deadline=time.monotonic() + deadline_s, tenant=tenant, **more)  # type: ignore[arg-type]

    async def ask(self, call: Call | None = None) -> tuple[Head, list[Chunk]]:
        async with aclosing(self.service.answer(call or self.call())) as pieces:
            found = [piece async for piece in pieces]
        head, *chunks = found
        assert isinstance(head, Head)
        return head, [chunk for chunk in chunks if isinstance(chunk, Chunk)]

    @property
    def is_free(self) -> bool:
        """Nothing runs, and every place is free."""
        return not any(door.running or door.waiting for door in self.doors.values()) and not any(
            triton.open for triton in self.tritons.values()
        )


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def end_of(chunks: list[Chunk]) -> Chunk:
    """The piece with the reason to stop."""
    (found,) = [chunk for chunk in chunks if chunk.finish_reason is not None]
    return found
