"""Tiers with a scripted Triton; admission, fallback and service are the real ones."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType

import anyio

from causeway_server.cloud_pool.admission import AdmissionController, Priority
from causeway_server.cloud_pool.core.request_context import AnswerHead, CachedAnswer, RequestContext
from causeway_server.cloud_pool.degradation.config import DegradationConfig
from causeway_server.cloud_pool.degradation.fallback import TierFallback, TierSignals
from causeway_server.cloud_pool.degradation.tier_attempt import TierRuntime
from causeway_server.cloud_pool.serving.service import Service
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.cloud_pool.upstreams.inference import Delta, InferenceRequest
from causeway_server.models.catalog.artifact import Answers
from causeway_server.router.types import Chunk, Message, Request

CHAT = Request(kind="chat", model="large", messages=(Message("user", "tell me"),), max_tokens=100)
WORDS = ("one ", "two ", "three ", "four ", "five ", "six ")


class Hung:
    """In a script: wait for ever."""


class ScriptedTriton:
    """Plays `script`, one delta a word; an exception in it is raised. Continues where a prompt ends."""

    def __init__(self, *script: str | Exception | type[Hung]) -> None:
        self.script = script or WORDS
        self.requests: list[InferenceRequest] = []
        self.open = 0
        self.hangs = anyio.Event()

    by_prefix = False

    def begin(self, request: InferenceRequest, key: bytes = b"") -> None:
        return None

    async def generate(
        self, request: InferenceRequest, key: bytes = b"", begun: object = None
    ) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.open += 1
        try:
            text = str(request.prompt).partition("tell me|")[2]
            made = 0
            for word in self.script:
                if isinstance(word, Exception):
                    raise word
                if not isinstance(word, str):
                    self.hangs.set()
                    await anyio.sleep_forever()
                elif text.startswith(word):
                    text = text.removeprefix(word)
                else:
                    made += 1
                    reason = "length" if made == request.parameters.max_tokens else None
                    yield Delta(word, reason, 1, (), 3, reason is not None)
                    if reason:
                        return
            yield Delta("", "stop", 0, (), 3, True)
        finally:
            self.open -= 1


class EndpointAvailability:
    healthy = 1


class QueuePressure:
    """A scripted queue pressure; admission itself is real."""

    is_saturated = False
    queue_s = 0.0
    running = 0
    limit = 10
    held_s: float | None = None

    def saturated(self, now: float) -> bool:
        return self.is_saturated

    def expected_wait_s(self, priority: Priority) -> float:
        return self.queue_s


async def nothing_stale(request: Request, tenant: str) -> CachedAnswer | None:
    return None


class Bed:
    def __init__(
        self,
        tritons: dict[str, ScriptedTriton],
        *,
        permits: int = 4,
        max_queued: int = 0,
        max_sequences: Mapping[str, int] = MappingProxyType({}),
        objective_s: float = 0.0,
        truncated_answer_tokens: int = 2,
        answers: Answers = "text",
        stale: Callable[[Request, str], Awaitable[CachedAnswer | None]] = nothing_stale,
    ) -> None:
        self.tritons = tritons
        names = tuple(tritons)
        chat_format = ChatFormat(
            "{% for m in messages %}{{ m.content }}{% endfor %}|", context_tokens=1000, answers=answers
        )
        self.tiers = {
            name: Tier(
                TierConfig(name=name, template_file="x", max_sequences=max_sequences.get(name, 128)), chat_format
            )
            for name in names
        }
        self.admissions = {name: AdmissionController(permits, max_queued) for name in names}
        self.health = {name: EndpointAvailability() for name in names}
        self.pressure = {name: QueuePressure() for name in names}
        config = DegradationConfig(
            tiers=names, first_token_timeout_factor=1.0, truncated_answer_tokens=truncated_answer_tokens
        )
        signals = {name: TierSignals(self.health[name], self.pressure[name], objective_s) for name in names}
        self.now = 1000.0  # the fallback's clock; deadlines are real
        self.fallback = TierFallback(config, signals, clock=lambda: self.now)
        runtimes = {name: TierRuntime(self.tiers[name], self.admissions[name], tritons[name]) for name in names}
        self.service = Service(runtimes, self.fallback, find_stale=stale)

    def call(
        self,
        request: Request = CHAT,
        *,
        deadline_s: float = 60.0,
        tenant: str = "acme",
        priority: Priority = "standard",
        critical: bool = False,
    ) -> RequestContext:
        tier = self.tiers[request.model]
        return RequestContext(
            id="r",
            request=request,
            tier=tier,
            deadline=time.monotonic() + deadline_s,
            priority=priority,
            tenant=tenant,
            critical=critical,
        )

    async def send(self, call: RequestContext | None = None) -> tuple[AnswerHead, list[Chunk]]:
        async with aclosing(self.service.answer(call or self.call())) as pieces:
            found = [piece async for piece in pieces]
        head, *chunks = found
        assert isinstance(head, AnswerHead)
        return head, [chunk for chunk in chunks if isinstance(chunk, Chunk)]

    @property
    def is_free(self) -> bool:
        """Whether nothing runs and every permit is free."""
        demands = (admission.demand for admission in self.admissions.values())
        return not any(demands) and not any(triton.open for triton in self.tritons.values())


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def end_of(chunks: list[Chunk]) -> Chunk:
    """Return the chunk with the finish reason."""
    (found,) = [chunk for chunk in chunks if chunk.finish_reason is not None]
    return found
