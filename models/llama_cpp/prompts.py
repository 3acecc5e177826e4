"""Prompts to tokens: the chat template, the tokenizer, and a cache of recent results.

A prompt is counted before it is answered (the policy's token signals), and n choices share one prompt: the cache makes
that one tokenisation.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping

from router.errors import ContextLengthExceeded, InvalidRequest
from router.types import Message

from ..chat.template import DEFAULT_TEMPLATE, render
from .native.vocabulary import Tokens, Vocabulary
from .protocol import Prompt
from .scheduling.kv_cache import common_prefix
from .soft_tokens import NO_VECTORS, SoftTokenIds, Vectors

_CACHE_BYTES = 4 * 1024 * 1024
_PROMPT_BYTES, _TOKEN_BYTES = 1024, 16  # cost of a cached prompt: its objects; each token, with its text
_SYSTEM_ROLES = ("system", "developer")
SHORTEN = "Shorten it, or ask a model with more context."
_LONG = 1024 * 1024  # characters; tokenising more takes long enough to delay other callers


class PromptTooLong(ContextLengthExceeded):
    """The prompt is too long to be tokenised; `at_least` is a lower bound of its tokens."""

    def __init__(self, at_least: int, context: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens, this model's context is {context}. {SHORTEN}")
        self.at_least = at_least


class PromptEncoder:
    """Renders and tokenises prompts. Thread-safe.

    Raises:
        InvalidRequest: this model cannot take the prompt (or a subclass that says more).
    """

    def __init__(self, vocabulary: Vocabulary, template: str, context: int, soft: SoftTokenIds) -> None:
        """Prepare for one model.

        Args:
            vocabulary: the model's tokens.
            template: its chat template; "" for none.
            context: tokens of one sequence.
            soft: gives soft tokens their ids.
        """
        self._soft = soft
        self._vocabulary = vocabulary
        self._context = context
        self._template = template or DEFAULT_TEMPLATE
        self._bos, self._eos = vocabulary.name(vocabulary.bos), vocabulary.name(vocabulary.eos)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Prompt, Tokens] = OrderedDict()  # least recently used first
        self._cache_bytes = 0

    def count(self, prompt: Prompt) -> int:
        """Return the number of tokens, or a lower bound for a prompt that is far too long."""
        try:
            return len(self.tokens(prompt))
        except PromptTooLong as error:
            return error.at_least

    def encode(self, prompt: Prompt) -> tuple[Tokens, Vectors]:
        """Return the prompt's tokens, read-only int32 [tokens], and the vectors of the soft ones among them."""
        if not prompt.soft:
            return self.tokens(prompt), NO_VECTORS
        ids, vectors = self._soft.assign(prompt.soft)
        return self._encode(prompt, ids), vectors

    def tokens(self, prompt: Prompt) -> Tokens:
        """Return the prompt's tokens, read-only int32 [tokens]."""
        if prompt.soft:  # whose vectors are too large to be kept
            return self.encode(prompt)[0]
        with self._lock:
            if (cached := self._cache.get(prompt)) is not None:
                self._cache.move_to_end(prompt)
                return cached
        tokens = self._encode(prompt)
        tokens.flags.writeable = False
        self._store(prompt, tokens)
        return tokens

    def system_tokens(self, prompt: Prompt) -> int:
        """Return how many first tokens of a chat follow from its system messages and tools alone."""
        system = tuple(itertools.takewhile(lambda message: message.role in _SYSTEM_ROLES, prompt.messages))
        if not system or len(system) == len(prompt.messages):
            return 0
        try:
            # Nothing in what two unlike users have in common is a user's.
            one, other = (
                self.tokens(Prompt(messages=(*system, Message("user", text)), tools=prompt.tools))
                for text in ("A?", "7.")
            )
        except InvalidRequest:
            return 0
        return min(common_prefix(one, other), common_prefix(one, self.tokens(prompt)))

    def _encode(self, prompt: Prompt, soft: Mapping[str, Tokens] | None = None) -> Tokens:
        if prompt.messages:
            text = render(
                self._template,
                prompt.messages,
                prompt.tools,
                bos=self._bos,
                eos=self._eos,
                guard=self._vocabulary.guard,
            )
            self._check_length(text)
            tokens = self._vocabulary.encode(text + prompt.answer_start, special=True, soft=soft)
        elif prompt.text is not None:
            self._check_length(prompt.text)
            tokens = self._vocabulary.encode(prompt.text, special=prompt.parse_special, soft=soft)
        else:
            tokens = self._vocabulary.validate(prompt.tokens)
        if prompt.suffix is not None:
            tokens = self._vocabulary.frame_middle(tokens, prompt.suffix)
        if not len(tokens):
            raise InvalidRequest("the prompt is empty", param="messages" if prompt.messages else "prompt")
        if soft:
            _check_soft(tokens, soft)
        return tokens

    def _check_length(self, text: str) -> None:
        """Refuse a long text whose characters alone prove that it does not fit; a token has a maximal length."""
        at_least = len(text) // max(1, self._vocabulary.max_piece_bytes)
        if len(text) > _LONG and at_least > self._context:
            raise PromptTooLong(at_least, self._context)

    def _store(self, prompt: Prompt, tokens: Tokens) -> None:
        if _cost(tokens) > _CACHE_BYTES:
            return
        with self._lock:
            if prompt not in self._cache:
                self._cache[prompt] = tokens
                self._cache_bytes += _cost(tokens)
            while self._cache_bytes > _CACHE_BYTES:
                _, evicted = self._cache.popitem(last=False)
                self._cache_bytes -= _cost(evicted)


def _check_soft(tokens: Tokens, soft: Mapping[str, Tokens]) -> None:
    """Raises InvalidRequest: a template lost soft tokens, or nothing follows them."""
    if not all(ids.min() in tokens for ids in soft.values()):
        raise InvalidRequest("this model's chat template leaves soft tokens out of the prompt", param="messages")
    if tokens[-1] < 0:
        raise InvalidRequest("the prompt ends in soft tokens: text must follow them", param="messages")


def _cost(tokens: Tokens) -> int:
    return _PROMPT_BYTES + _TOKEN_BYTES * len(tokens)
