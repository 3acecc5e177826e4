"""The parsing of the body of `POST /v1/embeddings` into a `Request`, and the encoding and decoding of vectors.

On the wire a vector is a list of numbers, or base64 of little-endian float32, which OpenAI's own client requests.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final

import msgspec

from ..errors import CloudUnreadable
from ..types import Embeddings, Request, RoutingHints, Usage
from .completions import prompts_of
from .request_body import extra_of, load, merge_hints, too_deep, validate
from .wire import WireEmbedding

_ENCODER = msgspec.json.Encoder()
_FIELDS: Final = frozenset(WireEmbedding.__struct_fields__)


def parse_embedding(body: bytes, hints: RoutingHints) -> Request:
    """Parse and validate an embedding request. Raises InvalidRequest, which names the key that is wrong."""
    try:
        document = load(body)
        wire = validate(document, WireEmbedding)
        return Request(
            kind="embedding",
            model=wire.model,
            prompts=prompts_of(wire.input, "input", empty_text=False),
            dimensions=wire.dimensions,
            encoding_format=wire.encoding_format or "float",
            user=wire.user,
            extra=extra_of(document, _FIELDS),
            hints=merge_hints(hints, wire.causeway),
        )
    except RecursionError:
        raise too_deep() from None


class EncodedVector(msgspec.Struct):
    index: int
    embedding: tuple[float, ...] | str
    object: str = "embedding"


class EncodedUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EncodedVectors(msgspec.Struct):
    """The answer to `POST /v1/embeddings`."""

    data: list[EncodedVector]
    model: str
    usage: EncodedUsage
    object: str = "list"


class _ReceivedVector(msgspec.Struct):
    embedding: tuple[float, ...] | str
    index: int | None = None


class _ReceivedUsage(msgspec.Struct):
    prompt_tokens: int | None = None


class _ReceivedList(msgspec.Struct):
    data: list[_ReceivedVector]
    usage: _ReceivedUsage | None = None


_DECODER = msgspec.json.Decoder(_ReceivedList)


def encode_embeddings(request: Request, embeddings: Embeddings, model: str) -> bytes:
    """Encode the answer to `POST /v1/embeddings`, in the encoding that the request asks for."""
    base64_wanted = request.encoding_format == "base64"
    data = [
        EncodedVector(index, _to_base64(vector) if base64_wanted else vector)
        for index, vector in enumerate(embeddings.vectors)
    ]
    tokens = embeddings.usage.prompt_tokens
    return _ENCODER.encode(EncodedVectors(data, model, EncodedUsage(tokens, tokens)))


def decode_embeddings(body: bytes) -> Embeddings:
    """Decode a target's answer to vectors in the order of the inputs. Raises CloudUnreadable."""
    try:
        answer = _DECODER.decode(body)
        data = [(at if item.index is None else item.index, item) for at, item in enumerate(answer.data)]
        vectors = tuple([_to_floats(item.embedding) for _, item in sorted(data, key=lambda pair: pair[0])])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error, binascii.Error) as error:
        raise CloudUnreadable(f"The target's embeddings are malformed: {error}.") from None
    if not vectors or len({len(vector) for vector in vectors}) != 1 or not vectors[0]:
        raise CloudUnreadable("The target's embeddings are malformed: vectors are missing or differ in length.")
    prompt_tokens = 0 if answer.usage is None else answer.usage.prompt_tokens or 0
    return Embeddings(vectors, Usage(prompt_tokens=prompt_tokens))


def _to_base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _to_floats(wire: tuple[float, ...] | str) -> tuple[float, ...]:
    if not isinstance(wire, str):
        return wire
    raw = base64.b64decode(wire, validate=True)
    return struct.unpack(f"<{len(raw) // 4}f", raw)
