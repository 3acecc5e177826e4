"""The `sampling_parameters` tensor of Triton's vLLM backend: JSON that the gateway writes and our CPU model reads.

Names and defaults are vLLM's `SamplingParams`; a stock vLLM deployment reads what the gateway writes. Grammars
travel as that backend takes them: a JSON document inside a string, under `guided_decoding` (up to release 25.08) or
`structured_outputs`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from router.errors import InvalidRequest
from router.types import Request, Sampling

GuidedKey = Literal["guided_decoding", "structured_outputs"]
ANY_OBJECT = "{}"
"""The schema that every JSON object obeys (models.llama_cpp.protocol)."""


class Guided(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the output must obey. `grammar` is GBNF here and EBNF in vLLM, so the gateway sends schemas only."""

    json: dict[str, object] | str | None = None  # a schema, or a text that holds one
    grammar: str = ""
    json_object: bool = False
    copy_source: str | None = None  # of our engine alone (models.llama_cpp.protocol.Job), as is:
    answer_prefix: str = ""

    @property
    def schema(self) -> str:
        """The JSON schema as text, "" for none. Raises InvalidRequest when it is no object."""
        if self.json is None:
            return ANY_OBJECT if self.json_object else ""
        if isinstance(self.json, str):
            try:
                msgspec.json.decode(self.json, type=dict[str, object])
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"the JSON schema is not an object: {error}") from error
            return self.json
        # The order of keys stays: it is the order in which the model answers.
        return msgspec.json.encode(self.json).decode()


class SamplingParameters(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's parameters as far as our engine has them; a name outside this list is refused."""

    n: int = 1
    max_tokens: int | None = 16
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
    guided_decoding: str | Guided | None = None
    structured_outputs: str | Guided | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def guided(self) -> Guided:
        """Raises InvalidRequest when the document inside the string is not what `Guided` says."""
        found = self.guided_decoding or self.structured_outputs
        if not isinstance(found, str):
            return found or Guided()
        try:
            return msgspec.json.decode(found, type=Guided)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"sampling_parameters.guided_decoding: {error}") from error

    def sampling(self, index: int) -> Sampling:
        """For sequence `index` of n: each has a seed of its own, or all would say the same."""
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


class _Extra(msgspec.Struct, frozen=True):
    """Of the fields that OpenAI does not know, those that vLLM's own server takes and our engine has."""

    ignore_eos: bool = False


def from_request(
    request: Request,
    *,
    max_tokens: int,
    schema: str,
    guided_key: GuidedKey,
    temperature: float = 1.0,
    copy_source: str | None = None,
    answer_prefix: str = "",
) -> SamplingParameters:
    """What Triton shall do for one prompt of `request`. Raises InvalidRequest.

    `max_tokens` and `temperature` hold where the caller names none. `schema` is JSON, "" for free text. `copy_source` and
    `answer_prefix` hold a call of our own engine where there is no schema.
    """
    wish = request.sampling
    rules = (
        _guided(schema)
        if schema or copy_source is None
        else Guided(copy_source=copy_source, answer_prefix=answer_prefix)
    )
    guided = {guided_key: msgspec.json.encode(rules).decode()} if rules != Guided() else {}
    try:
        extra = msgspec.json.decode(request.extra or "{}", type=_Extra)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    return SamplingParameters(
        n=request.n,
        max_tokens=request.max_tokens or max_tokens,
        temperature=_or(wish.temperature, temperature),
        top_p=_or(wish.top_p, 1.0),
        top_k=wish.top_k or 0,
        min_p=_or(wish.min_p, 0.0),
        presence_penalty=_or(wish.presence_penalty, 0.0),
        frequency_penalty=_or(wish.frequency_penalty, 0.0),
        repetition_penalty=_or(wish.repeat_penalty, 1.0),
        seed=wish.seed,
        stop=request.stop,
        logit_bias={str(token): bias for token, bias in wish.logit_bias},
        logprobs=request.logprobs,
        ignore_eos=extra.ignore_eos,
        **guided,
    )


def _guided(schema: str) -> Guided:
    if not schema:
        return Guided()
    return Guided(json_object=True) if schema == ANY_OBJECT else Guided(json=msgspec.json.decode(schema))


def encode(parameters: SamplingParameters) -> bytes:
    """`max_tokens` is always written out: the backend's own default of 16 is never meant."""
    document = msgspec.to_builtins(parameters)
    return msgspec.json.encode({**document, "max_tokens": parameters.max_tokens})


def decode(document: bytes | str) -> SamplingParameters:
    """Numbers may come as strings, as in the backend's own examples. Raises InvalidRequest, naming the key."""
    try:
        found = msgspec.json.decode(document, type=SamplingParameters, strict=False)
        bad_tokens = [token for token in found.logit_bias if not token.isascii() or not token.isdigit()]
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"sampling_parameters: {error}") from error
    if bad_tokens:
        raise InvalidRequest(f"sampling_parameters.logit_bias: {bad_tokens[0]!r} is not a token id")
    if not 1 <= found.n <= 128:
        raise InvalidRequest(f"sampling_parameters.n: {found.n} is not between 1 and 128")
    return found


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
