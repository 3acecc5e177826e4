"""The bodies and answers of `POST /v1/tokenize` and `/v1/detokenize`, in the form of vLLM's `/tokenize` and
`/detokenize`.

A chat is counted as its template renders it, with the beginning of the answer; a prompt as `/v1/completions` reads it.

Source: https://docs.vllm.ai/en/latest/api/vllm/entrypoints/serve/tokenize/protocol/
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..described import described
from ..errors import InvalidRequest, MissingField, UnsupportedFeature
from ..types import Request, RoutingHints
from .chat import parse_chat
from .request_body import load, too_deep, validate
from .wire import Name, Tokens, WireMessage, WireTool

TOKENIZE: Final = "/v1/tokenize"
DETOKENIZE: Final = "/v1/detokenize"
_CHAT: Final = ("model", "messages", "tools")
# Fields with only one value that is true here: that value, and what to do instead of another one.
_FIXED: Final = {
    "add_generation_prompt": (True, "a chat's tokens include the beginning of the answer. Send true, or leave it out."),
    "continue_final_message": (False, "an answer cannot continue a message. Send false, or leave it out."),
    "return_token_strs": (False, f"only ids are returned. Send them to {DETOKENIZE}."),
}


@described
class WireTokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A `prompt`, or a chat: `messages` and `tools`."""

    model: Name
    prompt: str | None = None
    messages: Annotated[list[WireMessage], Meta(min_length=1)] | None = None
    tools: list[WireTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


@described
class WireDetokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name
    tokens: Tokens

    def request(self, hints: RoutingHints) -> Request:
        """Return the tokens as the prompt of a completion, for the choice of a model."""
        return Request(kind="completion", model=self.model, prompts=(tuple(self.tokens),), hints=hints)


class TokenList(msgspec.Struct, frozen=True):
    """The answer of `/v1/tokenize`. `max_model_len`: the model's context."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]


class DetokenizedText(msgspec.Struct, frozen=True):
    """The answer of `/v1/detokenize`."""

    prompt: str


class TokenizeRequest(msgspec.Struct, frozen=True):
    """A chat, or a completion with one prompt. `adds_special`: whether a prompt gets a beginning-of-sequence token."""

    request: Request
    adds_special: bool = True


def parse_tokenize(body: bytes, hints: RoutingHints) -> TokenizeRequest:
    """Parse and validate the body of `POST /v1/tokenize`. Raises InvalidRequest, which names the key that is wrong."""
    try:
        document = load(body)
        wire = validate(document, WireTokenize)
    except RecursionError:
        raise too_deep() from None
    for name, (value, advice) in _FIXED.items():
        if getattr(wire, name) not in (None, value):
            raise UnsupportedFeature(f"`{name}`: {advice}", param=name)
    if wire.prompt is None and wire.messages is None:
        raise MissingField("`prompt` is missing. Send a text, or a chat as `messages`.", param="prompt")
    if wire.prompt is not None:
        for name in ("messages", "tools"):
            if getattr(wire, name) is not None:
                raise InvalidRequest(
                    f"`{name}` belongs to a chat, but the request has a `prompt`. Send one of them.", param=name
                )
        request = Request(kind="completion", model=wire.model, prompts=(wire.prompt,), hints=hints)
        return TokenizeRequest(request, wire.add_special_tokens is not False)
    if wire.add_special_tokens:
        message = "`add_special_tokens`: a chat's template writes the special tokens. Send false, or leave it out."
        raise UnsupportedFeature(message, param="add_special_tokens")
    chat = {name: document[name] for name in _CHAT if document.get(name) is not None}
    return TokenizeRequest(parse_chat(msgspec.json.encode(chat), hints))


def parse_detokenize(body: bytes) -> WireDetokenize:
    """Parse and validate the body of `POST /v1/detokenize`. Raises InvalidRequest, as `parse_tokenize`."""
    return validate(load(body), WireDetokenize)
