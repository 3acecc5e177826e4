"""Embedding vectors on the wire: numbers, or base64 of little-endian float32 (what OpenAI's own client asks for)."""

from __future__ import annotations

import base64
import binascii
import struct

import msgspec

from ..errors import CloudFailed
from ..types import Embeddings, Request, Usage

_ENCODER = msgspec.json.Encoder()


class _Vector(msgspec.Struct):
    index: int
    embedding: tuple[float, ...] | str
    object: str = "embedding"


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class _List(msgspec.Struct):
    data: list[_Vector]
    model: str
    usage: _EmbeddingUsage
    object: str = "list"


class _InVector(msgspec.Struct):
    embedding: tuple[float, ...] | str
    index: int | None = None


class _InUsage(msgspec.Struct):
    prompt_tokens: int | None = None


class _In(msgspec.Struct):
    data: list[_InVector]
    usage: _InUsage | None = None


_DECODER = msgspec.json.Decoder(_In)


def encode_embeddings(request: Request, embeddings: Embeddings, model: str) -> bytes:
    """The answer to `POST /v1/embeddings`, in the encoding that the request asked for."""
    base64_wanted = request.encoding_format == "base64"
    data = [
        _Vector(index, _to_base64(vector) if base64_wanted else vector)
        for index, vector in enumerate(embeddings.vectors)
    ]
    tokens = embeddings.usage.prompt_tokens
    return _ENCODER.encode(_List(data, model, _EmbeddingUsage(tokens, tokens)))


def decode_embeddings(body: bytes) -> Embeddings:
    """A target's answer, its vectors in the order of the inputs. Raises CloudFailed."""
    try:
        answer = _DECODER.decode(body)
        data = [(at if item.index is None else item.index, item) for at, item in enumerate(answer.data)]
        vectors = tuple([_vector(item.embedding) for _, item in sorted(data, key=lambda pair: pair[0])])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error, binascii.Error) as error:
        raise CloudFailed(f"The target's embeddings are malformed: {error}.") from None
    if not vectors or len({len(vector) for vector in vectors}) != 1 or not vectors[0]:
        raise CloudFailed("The target's embeddings are malformed: vectors are missing or differ in length.")
    prompt_tokens = 0 if answer.usage is None else answer.usage.prompt_tokens or 0
    return Embeddings(vectors, Usage(prompt_tokens=prompt_tokens))


def _to_base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _vector(wire: tuple[float, ...] | str) -> tuple[float, ...]:
    if not isinstance(wire, str):
        return wire
    raw = base64.b64decode(wire, validate=True)
    return struct.unpack(f"<{len(raw) // 4}f", raw)
