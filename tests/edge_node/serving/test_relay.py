"""Text that a target's connection passes to the client without the task of the attempt: slow clients, and gone ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence

import msgspec
import pytest

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.serving.generation import AttemptRunner, Generation
from causeway_server.router.bundle.settings import CloudSettings
from causeway_server.router.decision.attempts import AttemptSequence
from causeway_server.router.errors import ClientGone, StreamBroken
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.serving.reply import AnswerHead, Piece, TextSink
from causeway_server.router.types import AttemptPlan, Chunk, Decision, Embeddings, Request, Snapshot, Target

POLICY = parse_policy("version: 1\nname: p\ntargets: {l: {at: cloud, model: m}}\nroutes: [{name: r, use: [l]}]\n")


class Backend:
    """Offers each of `texts` to the relay and yields the refused ones, between a first chunk and the end."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.refused = ""
        self.error: StreamBroken | None = None
        self.closed = False

    async def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        assert call.relay is not None
        try:
            assert not call.relay.take([b'"too early"'], 0)
            yield Chunk("0", tokens=1)
            assert not call.relay.take([b'"of another choice"'], 1)
            for text in self.texts:
                if not call.relay.take([msgspec.json.encode(text)], 0):
                    self.refused += text
                    yield Chunk(text, tokens=1)
            if self.error is not None:
                raise self.error
            yield Chunk(finish_reason="stop")
        finally:
            self.closed = True

    def complete(self, call: BackendRequest) -> None:
        return None

    async def embed(self, call: BackendRequest) -> Embeddings:
        raise NotImplementedError

    async def close(self) -> None: ...


class Client:
    """A client that is slow, or gone, when it gets a text that `slow` or `gone` names. Also its own text sink."""

    def __init__(self, *, slow: str = "", gone: str = "", takes_text: bool = True) -> None:
        self.got = ""
        self.drained = ""
        self._slow, self._gone, self._takes_text = slow, gone, takes_text

    async def commit(self, head: AnswerHead) -> None: ...

    def text_sink(self, index: int) -> TextSink | None:
        return Sink(self) if self._takes_text else None

    def send(self, piece: Piece) -> Awaitable[None] | None:
        return self.take(piece.text) if isinstance(piece, Chunk) and piece.text else None

    def take(self, text: str) -> Awaitable[None] | None:
        if text == self._gone:
            raise ClientGone("gone")
        self.got += text
        return self._drain(text) if text and text in self._slow else None

    async def _drain(self, text: str) -> None:
        await asyncio.sleep(0)
        self.drained += text


class Sink:
    def __init__(self, client: Client) -> None:
        self._client = client

    def send(self, texts: Sequence[bytes]) -> Awaitable[None] | None:
        return self._client.take("".join(map(msgspec.json.decode, texts)))


async def run(backend: Backend, client: Client) -> Generation:
    request = Request(kind="chat", model="auto", stream=True)
    now = asyncio.get_running_loop().time()
    one = Generation("1", request, POLICY, Snapshot(), arrived=now, deadline=now + 30.0)
    one.decision = Decision("p", "1", "r", (AttemptPlan(Target("l", "cloud", "m")),))
    one.sequence = AttemptSequence(one.decision, stream=True, arrived=now)
    try:
        await AttemptRunner({"cloud": backend}, CloudSettings()).run(one, client)
    finally:
        assert backend.closed
    return one


@pytest.mark.parametrize("takes_text", [True, False])
async def test_text_reaches_the_client_once_and_is_counted(takes_text: bool) -> None:
    backend, client = Backend(*"abc"), Client(takes_text=takes_text)
    one = await run(backend, client)
    assert client.got == "0abc"
    assert backend.refused == ("" if takes_text else "abc")
    assert one.sequence is not None
    assert one.sequence.attempts[0].tokens == 4


async def test_a_slow_client_is_waited_for_before_its_next_text() -> None:
    """And gets text past the task again when it has caught up."""
    backend, client = Backend(*"abcd"), Client(slow="b")
    await run(backend, client)
    assert (client.got, client.drained, backend.refused) == ("0abcd", "b", "c")


async def test_a_slow_client_is_waited_for_at_the_end() -> None:
    backend, client = Backend(*"ab"), Client(slow="b")
    await run(backend, client)
    assert (client.got, client.drained) == ("0ab", "b")


async def test_a_client_that_leaves_while_text_is_passed_on_ends_the_work() -> None:
    backend, client = Backend(*"abcd"), Client(gone="b")
    with pytest.raises(ClientGone):
        await run(backend, client)
    assert (client.got, backend.refused) == ("0a", "b")


async def test_an_answer_that_breaks_after_a_slow_client_leaves_nothing_behind() -> None:
    """No coroutine that was never awaited, which would be a warning, and so an error here."""

    backend, client = Backend(*"ab"), Client(slow="b")
    backend.error = StreamBroken("broken", phase="stream")
    with pytest.raises(StreamBroken):
        await run(backend, client)
    assert client.drained == ""
