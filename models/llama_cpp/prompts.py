"""Prompts to tokens: the chat template, the tokenizer, and a memory of the last ones.

A prompt is counted before it is answered (the policy asks), and n choices have the same one: it is tokenised once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from router.errors import ContextLengthExceeded, InvalidRequest

from ..chat.template import DEFAULT_TEMPLATE, render
from .native.vocabulary import Tokens, Vocabulary
from .protocol import Prompt

_REMEMBERED_BYTES = 4 * 1024 * 1024
_PROMPT_BYTES, _TOKEN_BYTES = 1024, 16  # of a prompt that is remembered: its objects; each token, with its text
SHORTEN = "Shorten it, or ask a model with more context."
_LONG = 1024 * 1024  # characters; tokenising so much takes so long that other callers notice


class PromptTooLong(ContextLengthExceeded):
    """So long that it was not even tokenised."""

    def __init__(self, at_least: int, context: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens, this model's context is {context}. {SHORTEN}")
        self.at_least = at_least


class PromptEncoder:
    """Thread-safe. Raises InvalidRequest (or its kin) for a prompt that this model cannot take."""

    def __init__(self, vocabulary: Vocabulary, template: str, context: int) -> None:
        """`context`: tokens that the model can take."""
        self._vocabulary = vocabulary
        self._context = context
        self._template = template or DEFAULT_TEMPLATE
        self._bos, self._eos = vocabulary.name(vocabulary.bos), vocabulary.name(vocabulary.eos)
        self._lock = threading.Lock()
        self._known: OrderedDict[Prompt, Tokens] = OrderedDict()  # least recently used first
        self._known_bytes = 0

    def count(self, prompt: Prompt) -> int:
        """Tokens of a prompt; of one that is far too long, how many it has at least."""
        try:
            return len(self.tokens(prompt))
        except PromptTooLong as error:
            return error.at_least

    def tokens(self, prompt: Prompt) -> Tokens:
        with self._lock:
            if (known := self._known.get(prompt)) is not None:
                self._known.move_to_end(prompt)
                return known
        tokens = self._encode(prompt)
        tokens.flags.writeable = False
        self._remember(prompt, tokens)
        return tokens

    def _encode(self, prompt: Prompt) -> Tokens:
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
            tokens = self._vocabulary.encode(text, special=True)
        elif prompt.text is not None:
            self._check_length(prompt.text)
            tokens = self._vocabulary.encode(prompt.text, special=prompt.parse_special)
        else:
            tokens = self._vocabulary.check(prompt.tokens)
        if not len(tokens):
            raise InvalidRequest("the prompt is empty", param="messages" if prompt.messages else "prompt")
        return tokens

    def _check_length(self, text: str) -> None:
        """No token stands for more than the longest one's bytes, so some texts are too long at first sight."""
        at_least = len(text) // max(1, self._vocabulary.longest)
        if len(text) > _LONG and at_least > self._context:
            raise PromptTooLong(at_least, self._context)

    def _remember(self, prompt: Prompt, tokens: Tokens) -> None:
        if _bytes(tokens) > _REMEMBERED_BYTES:
            return
        with self._lock:
            if prompt not in self._known:
                self._known[prompt] = tokens
                self._known_bytes += _bytes(tokens)
            while self._known_bytes > _REMEMBERED_BYTES:
                _, old = self._known.popitem(last=False)
                self._known_bytes -= _bytes(old)


def _bytes(tokens: Tokens) -> int:
    return _PROMPT_BYTES + _TOKEN_BYTES * len(tokens)
