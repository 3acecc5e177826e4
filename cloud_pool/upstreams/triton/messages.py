"""Messages between the gateway and our models in Triton, in the tensors of Triton's vLLM backend. Pure.

`sampling_parameters` is JSON that the gateway writes and our CPU model reads. Names and defaults are those of vLLM's
`SamplingParams`, so a stock vLLM deployment accepts what the gateway writes. Grammars are sent in that backend's form:
a JSON document inside a string, under `guided_decoding` (up to release 25.08) or `structured_outputs`.

`logprobs` is JSON, one `{token id: {logprob, rank, decoded_token}}` per token. The chosen token comes first, then the
best ones by rank (which may include it). Our engine has no token ids there, so its keys only distinguish entries. The
key `bytes` is ours, written only for a token that is not valid UTF-8 alone; vLLM has none.

An encoder model gets JSON in the tensor `job`, beside the part as the bytes that the client sent, and answers JSON in
`text_output`. The outcome of a part is an answer and not an error of Triton: a file that kills its decoder does not
count against the tier.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from causeway_server.models.parts.process.messages import Found, Refused, SegmentFound
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.reasoning import Thinking, thinking_limit, thinks
from causeway_server.router.tool_calls.schema import NO_FRAME, CallFrame
from causeway_server.router.types import Modality, Request, Sampling, TokenAlternative, TokenLogprob

GuidedKey = Literal["guided_decoding", "structured_outputs"]
ANY_OBJECT = "{}"
"""The JSON schema of any object (models.llama_cpp.protocol)."""
_UNWRITTEN_MAX_TOKENS = 16  # the backend's default
_LOWEST = -9999.0
"""Lowest log probability: JSON has no -inf; OpenAI's servers write this value for it."""


class Guided(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Constrained decoding. `grammar` is llguidance's Lark, so the gateway, which may ask vLLM, sends only schemas.

    The fields from `copy_source` on are understood by our engine alone (models.llama_cpp.protocol.Job).
    """

    json: dict[str, object] | str | None = None  # a schema, or a string that contains one
    grammar: str = ""
    json_object: bool = False
    copy_source: str | None = None
    call_frame: CallFrame = NO_FRAME
    thinking: Thinking = ""
    thinking_tokens: int | None = None

    @property
    def schema(self) -> str:
        """JSON schema as text, "" for none. Raises InvalidRequest if it is not a JSON object."""
        if self.json is None:
            return ANY_OBJECT if self.json_object else ""
        if isinstance(self.json, str):
            try:
                msgspec.json.decode(self.json, type=dict[str, object])
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"The JSON schema is not an object: {error}") from error
            return self.json
        # Keep the order of keys: the model answers in this order.
        return msgspec.json.encode(self.json).decode()


class SamplingParameters(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The subset of vLLM's parameters that our engine supports; other names are refused."""

    n: int = 1
    max_tokens: int | None = _UNWRITTEN_MAX_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    logit_bias: dict[str, float] = {}
    logprobs: int | None = None
    ignore_eos: bool = False
    lora_name: str = ""  # the LoRA adapter; "": the model as it is
    guided_decoding: str | Guided | None = None
    structured_outputs: str | Guided | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def guided(self) -> Guided:
        """Decoded constraints. Raises InvalidRequest if the string inside is not a valid `Guided` document."""
        document = self.guided_decoding or self.structured_outputs
        if not isinstance(document, str):
            return document or Guided()
        try:
            return msgspec.json.decode(document, type=Guided)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"`sampling_parameters.guided_decoding`: {error}") from error

    def sampling(self, index: int) -> Sampling:
        """Return the sampling of sequence `index` of n, with a different seed for each, so that they differ."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_penalty=self.repetition_penalty,
            seed=None if self.seed is None else self.seed + index,
            logit_bias=tuple(sorted((int(token), bias) for token, bias in self.logit_bias.items())),
        )


class _VllmExtensions(msgspec.Struct, frozen=True):
    """Request fields outside OpenAI's API that vLLM's server accepts and our engine supports."""

    ignore_eos: bool = False


_NO_EXTENSIONS = _VllmExtensions()


def from_request(
    request: Request,
    *,
    max_tokens: int,
    schema: str,
    guided_key: GuidedKey,
    frame: CallFrame = NO_FRAME,
    thinking: Thinking = "",
    temperature: float = 1.0,
    copy_source: str | None = None,
    adapter: str = "",
) -> SamplingParameters:
    """Translate `request` into the parameters of one of its sequences.

    Args:
        max_tokens, temperature: Used if the request sets none.
        schema: JSON schema of the answer, "" for free text.
        guided_key: Field under which the tier's vLLM release reads grammars.
        frame: Text around the objects of the schema (our engine only).
        thinking: Format of the model's thinking, if the request may bound it (our engine only).
        copy_source: Text that tool-call arguments must be copied from, without a schema (our engine only).
        adapter: LoRA adapter of the model that answers.

    Raises:
        InvalidRequest: A field outside OpenAI's API has the wrong type.
    """
    sampling = request.sampling
    rules = _guided(schema, frame) if schema or copy_source is None else Guided(copy_source=copy_source)
    if thinking and thinks(request, thinking) and (limit := thinking_limit(request)) is not None:
        rules = msgspec.structs.replace(rules, thinking=thinking, thinking_tokens=limit)
    guided = {guided_key: msgspec.json.encode(rules).decode()} if rules != Guided() else {}
    try:
        extra = msgspec.json.decode(request.extra, type=_VllmExtensions) if request.extra else _NO_EXTENSIONS
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    return SamplingParameters(
        n=1,
        max_tokens=request.max_tokens or max_tokens,
        temperature=_or(sampling.temperature, temperature),
        top_p=_or(sampling.top_p, 1.0),
        top_k=sampling.top_k or 0,
        min_p=_or(sampling.min_p, 0.0),
        presence_penalty=_or(sampling.presence_penalty, 0.0),
        frequency_penalty=_or(sampling.frequency_penalty, 0.0),
        repetition_penalty=_or(sampling.repeat_penalty, 1.0),
        seed=sampling.seed,
        stop=request.stop,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias},
        logprobs=request.logprobs,
        ignore_eos=extra.ignore_eos,
        lora_name=adapter,
        **guided,
    )


def _guided(schema: str, frame: CallFrame) -> Guided:
    if not schema:
        return Guided()
    if schema == ANY_OBJECT:
        return Guided(json_object=True)
    return Guided(json=msgspec.json.decode(schema), call_frame=frame)


def encode_parameters(parameters: SamplingParameters) -> bytes:
    """Encode for the tensor; `max_tokens` is always written, because the backend's default of 16 is never intended."""
    if parameters.max_tokens != _UNWRITTEN_MAX_TOKENS:
        return msgspec.json.encode(parameters)
    return msgspec.json.encode({**msgspec.to_builtins(parameters), "max_tokens": parameters.max_tokens})


def decode_parameters(document: bytes | str) -> SamplingParameters:
    """Decode the tensor; numbers may be strings, as in the backend's examples. Raises InvalidRequest naming the key."""
    try:
        parameters = msgspec.json.decode(document, type=SamplingParameters, strict=False)
        bad_tokens = [token for token in parameters.logit_bias if not token.isascii() or not token.isdigit()]
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"`sampling_parameters`: {error}") from error
    if bad_tokens:
        raise InvalidRequest(f"`sampling_parameters.logit_bias`: {bad_tokens[0]!r} is not a token id.")
    if not 1 <= parameters.n <= 128:
        raise InvalidRequest(f"`sampling_parameters.n`: {parameters.n} is not between 1 and 128.")
    return parameters


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    bytes: tuple[int, ...] | None = None


_decoder = msgspec.json.Decoder(list[dict[str, _Entry]] | None)


def encode_logprobs(tokens: tuple[TokenLogprob, ...]) -> bytes:
    return msgspec.json.encode([_entries(token) for token in tokens])


def decode_logprobs(document: bytes, alternatives: int) -> tuple[TokenLogprob, ...]:
    """Decode with at most `alternatives` per token. Raises msgspec.DecodeError."""
    return tuple(_token(entries, alternatives) for entries in _decoder.decode(document) or () if entries)


def _entries(token: TokenLogprob) -> dict[str, _Entry]:
    ranks = {_name(one): rank for rank, one in enumerate(token.top, 1)}
    chosen = _Entry(
        logprob=max(token.logprob, _LOWEST),
        rank=ranks.get(_name(token), len(token.top) + 1),
        decoded_token=token.token,
        bytes=_odd_bytes(token),
    )
    entries = {"0": chosen}
    for rank, one in enumerate(token.top, 1):
        if _name(one) != _name(token):
            entries[str(rank)] = _Entry(max(one.logprob, _LOWEST), rank, one.token, _odd_bytes(one))
    return entries


def _name(token: TokenLogprob | TokenAlternative) -> tuple[str, tuple[int, ...] | None]:
    return token.token, token.bytes


def _odd_bytes(token: TokenLogprob | TokenAlternative) -> tuple[int, ...] | None:
    return None if token.bytes is None or bytes(token.bytes) == token.token.encode() else token.bytes


def _token(entries: dict[str, _Entry], count: int) -> TokenLogprob:
    alternatives = [_alternative(entry) for entry in entries.values()]
    by_rank = sorted(
        zip((entry.rank or 0 for entry in entries.values()), alternatives, strict=True), key=lambda pair: pair[0]
    )
    chosen = alternatives[0]
    top = tuple(one for _, one in by_rank[:count])
    return TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top=top)


def _alternative(entry: _Entry) -> TokenAlternative:
    text = entry.decoded_token or ""
    return TokenAlternative(token=text, logprob=max(entry.logprob, _LOWEST), bytes=entry.bytes or tuple(text.encode()))


class EncodeJob(msgspec.Struct, frozen=True):
    """The extraction requested for a part. For audio, all fields but `kind` are as in `AudioTerms` and `Transcribe`."""

    kind: Modality
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    tell: bool = False
    words: bool = False


class PartRead(msgspec.Struct, frozen=True, tag="read"):
    """The part was read. `seconds`: duration of audio."""

    found: Found
    seconds: float = 0.0


class PartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The part could not be read. `late`: it timed out."""

    reason: str
    late: bool = False


PartReply = SegmentFound | PartRead | Refused | PartFailed
"""Reply for a part: segments, if requested, followed by one of the others."""

read_job = msgspec.json.Decoder(EncodeJob).decode
"""Decode the tensor `job`. Raises msgspec.DecodeError."""
read_reply = msgspec.json.Decoder[PartReply](PartReply).decode
"""Decode the tensor `text_output`. Raises msgspec.DecodeError."""
