"""Our engine as the daemon runs it, and servers of llama.cpp, behind one interface: answers at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import msgspec

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.backends.engine.backend import EngineBackend, EngineModel
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.router.types import Message, Request, Sampling, Target
from tests.openai_servers import OpenAIServer, llama_server_command, running, xllamacpp_command

START_S = 120.0
GREEDY = Sampling(temperature=0.0)


class ShortAnswer(RuntimeError):
    """An answer ended before it had as many tokens as the others; such a round compares nothing."""


class Client:
    """Something that answers prompts."""

    async def run(self, prompts: Sequence[str], tokens: int, *, whole: bool = False) -> float:
        """Return tokens/s of the answers to all prompts together, each of at most `tokens`.

        Args:
            whole: each answer must have as many.

        Raises:
            ShortAnswer: an answer ended before.
        """
        started = time.perf_counter()
        made = await asyncio.gather(*(self.answer(prompt, tokens) for prompt in prompts))
        elapsed_s = time.perf_counter() - started
        short = [prompt for prompt, number in zip(prompts, made, strict=True) if number != tokens]
        if whole and short:
            raise ShortAnswer(f"{type(self).__name__} ended the answers to {short} before {tokens} tokens")
        return sum(made) / elapsed_s

    async def answer(self, prompt: str, tokens: int) -> int:
        """Return the number of tokens made."""
        raise NotImplementedError


class OurEngine(Client):
    """The daemon's backend: child process, frames, Chunks."""

    def __init__(self, backend: EngineBackend) -> None:
        self.backend = backend

    async def answer(self, prompt: str, tokens: int) -> int:
        request = Request(kind="completion", model="small", prompts=(prompt,), max_tokens=tokens, sampling=GREEDY)
        return sum([chunk.tokens async for chunk in self.backend.generate(backend_request(request))])

    async def chat(self, text: str, tokens: int) -> float:
        """Return tokens/s of the answer to a chat's first message."""
        request = Request(
            kind="chat", model="small", messages=(Message("user", text),), max_tokens=tokens, sampling=GREEDY
        )
        started = time.perf_counter()
        made = sum([chunk.tokens async for chunk in self.backend.generate(backend_request(request))])
        return made / (time.perf_counter() - started)

    async def first_token_s(self, messages: tuple[Message, ...]) -> float:
        """Return the seconds to the first token of a chat."""
        request = Request(kind="chat", model="small", messages=messages, max_tokens=1, sampling=GREEDY)
        started = time.perf_counter()
        first_s = 0.0
        async for chunk in self.backend.generate(backend_request(request)):
            if chunk.tokens and not first_s:
                first_s = time.perf_counter() - started
        return first_s


class HttpServer(Client):
    """A server with OpenAI's completions."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def answer(self, prompt: str, tokens: int) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
        async with self._session.post(self._url, json=body) as response:
            answer = msgspec.json.decode(await response.read())
            return int(answer["usage"]["completion_tokens"])


@contextlib.asynccontextmanager
async def our_engine(
    path: Path, config: EngineConfig, prompt_folder: Path | None = None, weights_sha256: str = ""
) -> AsyncIterator[OurEngine]:
    """Run the engine in its child process."""
    backend = EngineBackend(
        path, config, EngineModel(weights_sha256=weights_sha256), prompt_folder=prompt_folder, prompt_key=bytes(32)
    )
    await backend.start()
    try:
        await backend.ready(asyncio.get_running_loop().time() + START_S)
        yield OurEngine(backend)
    finally:
        await backend.close()


def llama_server(path: Path, threads: int) -> AbstractAsyncContextManager[HttpServer]:
    """Run llama_cpp.server on the same compiled llama.cpp."""
    return _http_server("llama_cpp.server", llama_server_command(path, threads))


def xllamacpp_server(path: Path, threads: int, streams: int) -> AbstractAsyncContextManager[HttpServer]:
    """Run llama.cpp's own server as the package xllamacpp has it."""
    return _http_server("xllamacpp", xllamacpp_command(path, threads, streams))


@contextlib.asynccontextmanager
async def _http_server(name: str, command: Sequence[str]) -> AsyncIterator[HttpServer]:
    with tempfile.TemporaryDirectory() as folder, running(OpenAIServer(name, "small", command, Path(folder))) as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(START_S)) as session:
            yield HttpServer(session, f"{server.url}/completions")


def backend_request(request: Request) -> BackendRequest:
    target = Target(name="small", at="edge", model="small")
    deadline = asyncio.get_running_loop().time() + START_S
    return BackendRequest(id="bench", request=request, target=target, deadline=deadline, durable=True)
