"""Embedding vectors on the wire, both ways."""

from __future__ import annotations

import base64
import json
import struct
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse

from causeway_server.router.errors import CloudFailed
from causeway_server.router.openai.embeddings import decode_embeddings, encode_embeddings
from causeway_server.router.types import Embeddings, Request, Usage

VECTORS = Embeddings(((0.5, -1.0, 2.0), (0.0, 0.25, 1.0)), Usage(prompt_tokens=7))


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_survive_a_round_trip(encoding: Literal["float", "base64"]) -> None:
    request = Request(kind="embedding", model="m", prompts=("a", "b"), encoding_format=encoding)
    assert decode_embeddings(encode_embeddings(request, VECTORS, "m")) == VECTORS


def test_the_official_type_validates_numbers() -> None:
    body = encode_embeddings(Request(kind="embedding", model="m", prompts=("a", "b")), VECTORS, "encoder")
    answer = CreateEmbeddingResponse.model_validate_json(body, strict=True)
    assert [item.embedding for item in answer.data] == [list(vector) for vector in VECTORS.vectors]
    assert (answer.model, answer.usage.total_tokens, answer.data[1].index) == ("encoder", 7, 1)


def test_base64_is_little_endian_float32() -> None:
    request = Request(kind="embedding", model="m", prompts=("a", "b"), encoding_format="base64")
    data = json.loads(encode_embeddings(request, VECTORS, "m"))["data"]
    assert struct.unpack("<3f", base64.b64decode(data[0]["embedding"])) == VECTORS.vectors[0]


def test_vectors_are_ordered_by_index() -> None:
    body = json.dumps({"data": [{"index": 1, "embedding": [2]}, {"index": 0, "embedding": [1]}]}).encode()
    assert decode_embeddings(body).vectors == ((1.0,), (2.0,))
    body = json.dumps({"data": [{"embedding": [2]}, {"embedding": [1]}], "usage": {}}).encode()
    assert decode_embeddings(body) == Embeddings(((2.0,), (1.0,)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"data":[]}',
        b'{"data":[{"embedding":[]}]}',
        b'{"data":[{"embedding":[1]},{"embedding":[1,2]}]}',
        b'{"data":[{"embedding":"AAAA*"}]}',
        b'{"data":[{"embedding":"AAA="}]}',
        b'{"data":[{"embedding":["x"]}]}',
        b'{"error":{"message":"no"}}',
    ],
)
def test_bad_vectors_are_a_failed_target(body: bytes) -> None:
    with pytest.raises(CloudFailed):
        decode_embeddings(body)


@given(st.binary(max_size=60))
def test_any_bytes_are_vectors_or_a_failed_target(body: bytes) -> None:
    with pytest.raises(CloudFailed):
        decode_embeddings(body)
