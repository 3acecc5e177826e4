"""The tokens of prompts, as the model of a tier reads them:

1. a server with OpenAI's API      is asked (vLLM's `/tokenize`, `/detokenize`)
2. a model of our engine           has its vocabulary in the artifact's GGUF file
3. another model in Triton         has it in the tier's `tokenizer_file`
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import msgspec
from anyio import to_thread

from causeway_server.router.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, UnsupportedFeature
from causeway_server.router.openai.tokens import TokenizeRequest, TokenList
from causeway_server.router.types import Request

from ..dispatch.pool import Pool
from ..tiers.tier import Tier
from ..upstreams.openai_http import OpenAIUpstream
from .guard import GatewayGuard, GuardedRequest

T = TypeVar("T")


class FileTokenizer(Protocol):
    """A tokenizer in this process. `special`: a template has written the text, with control tokens."""

    def encode(self, text: str, *, special: bool, add_bos: bool) -> Iterable[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...


class _JsonTokenizer:
    """A `tokenizer.json`, as Triton's backends read it: they add special tokens to chats, too."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Model  # of the extra `tokenizers`

        try:
            self._model = Model.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise EngineUnavailable(f"{path} is not a readable tokenizer.json: {error}") from error

    def encode(self, text: str, *, special: bool, add_bos: bool) -> Iterable[int]:
        return self._model.encode(text, add_special_tokens=add_bos).ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        size = self._model.get_vocab_size()
        if (unknown := next((token for token in tokens if token >= size), None)) is not None:
            raise InvalidRequest(f"Token id {unknown} is unknown. Known ids: 0 to {size - 1}.", param="tokens")
        return self._model.decode(list(tokens), skip_special_tokens=False)


class TierTokenizers:
    """Tokenises for the tiers. A file is read when a request first needs it.

    Each method gets the loop's time by which it must end, and raises UnsupportedFeature for a tier without a tokenizer,
    another InvalidRequest for a prompt that cannot be rendered, or the error of the tier's server.
    """

    def __init__(self, pools: Mapping[str, Pool], guard: GatewayGuard | None = None) -> None:
        self._pools = pools
        self._guard = guard
        self._loaded: dict[str, FileTokenizer] = {}
        self._loading = threading.Lock()

    async def count(self, tier: Tier, request: Request, body: bytes, deadline: float) -> int:
        """Count the tokens of a message's prompt. `body`: for a server that counts messages only."""
        if tier.config.upstream.kind != "openai":
            return (await self.tokenize(tier, TokenizeRequest(request), deadline)).count
        tier.check_ability("chat")
        if self._guard is not None and (sent := await GuardedRequest(self._guard).check(request)) is not request:
            return (await self.tokenize(tier, TokenizeRequest(sent), deadline)).count  # `body` has the values
        with _leased(self._pools[tier.name]) as upstream:
            return await upstream.count(tier.model, request, body, deadline)

    async def tokenize(self, tier: Tier, asked: TokenizeRequest, deadline: float) -> TokenList:
        """Return the tokens of a request's only prompt."""
        tier.check_ability(asked.request.kind)
        if tier.config.upstream.kind == "openai":
            if self._guard is not None:
                sent = await GuardedRequest(self._guard).check(asked.request)
                asked = msgspec.structs.replace(asked, request=sent)
            with _leased(self._pools[tier.name]) as upstream:
                return await upstream.tokenize(tier.model, asked, deadline)
        (prompt,) = tier.prompts(asked.request)
        assert isinstance(prompt, str)  # `parse_tokenize` reads no ids
        special = asked.request.kind == "chat"

        def encode(tokenizer: FileTokenizer) -> tuple[int, ...]:
            return tuple(map(int, tokenizer.encode(prompt, special=special, add_bos=asked.adds_special)))

        ids = await self._on_thread(tier, encode, deadline)
        return TokenList(len(ids), tier.config.context_tokens or tier.chat_format.context_tokens, ids)

    async def detokenize(self, tier: Tier, tokens: tuple[int, ...], deadline: float) -> str:
        if tier.config.upstream.kind == "openai":
            with _leased(self._pools[tier.name]) as upstream:
                return await upstream.detokenize(tier.model, tokens, deadline)
        return await self._on_thread(tier, lambda tokenizer: tokenizer.detokenize(tokens), deadline)

    async def _on_thread(self, tier: Tier, work: Callable[[FileTokenizer], T], deadline: float) -> T:
        if not (path := tier.chat_format.tokenizer):
            message = (
                f"The tier {tier.name!r} has no tokenizer here. Ask the gateway's operator for a `tokenizer_file`."
            )
            raise UnsupportedFeature(message, param="model")

        def run() -> T:
            with self._loading:
                if path not in self._loaded:
                    self._loaded[path] = _load(Path(path), is_ours=tier.chat_format.is_ours)
            return work(self._loaded[path])

        try:
            with anyio.fail_after(max(0.0, deadline - anyio.current_time())):
                return await to_thread.run_sync(run, abandon_on_cancel=True)
        except TimeoutError:
            raise DeadlineExceeded("The deadline passed before the tokens were counted.") from None


@contextmanager
def _leased(pool: Pool) -> Iterator[OpenAIUpstream]:
    lease = pool.lease()
    try:
        assert isinstance(lease.upstream, OpenAIUpstream), "The caller has looked at the tier's upstream."
        yield lease.upstream
    finally:
        lease.close()


def _load(path: Path, *, is_ours: bool) -> FileTokenizer:
    try:
        if not is_ours:
            return _JsonTokenizer(path)
        from causeway_server.models.llama_cpp.native.vocabulary import Vocabulary  # of the extra `engine`

        return Vocabulary.of_file(path)
    except ImportError as error:
        extra = "engine" if is_ours else "tokenizers"
        message = f"This gateway cannot count tokens of the model: install causeway-router[{extra}]."
        raise UnsupportedFeature(message, param="model") from error
