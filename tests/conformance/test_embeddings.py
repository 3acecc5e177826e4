"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import math
import struct

import pytest

from .shapes import embedding_answer, error
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]
TEXTS = ["wake me up at six am", "play some jazz", "grüß dich 👋🏽"]


def vectors(surface: Surface, **fields: object) -> list[list[float]]:
    return [item["embedding"] for item in embedding_answer(surface.embed(**fields))["data"]]


def same(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, abs=1e-4)


def test_one_text(surface: Surface) -> None:
    answer = embedding_answer(surface.embed())
    (item,) = answer["data"]
    assert len(item["embedding"]) > 8
    assert all(isinstance(number, float) for number in item["embedding"])
    assert math.hypot(*item["embedding"]) == pytest.approx(1.0, abs=1e-3)


def test_several_texts_in_their_order(surface: Surface) -> None:
    together = vectors(surface, input=TEXTS)
    alone = [vectors(surface, input=text)[0] for text in TEXTS]
    assert len(together) == len(TEXTS)
    assert all(same(one, other) for one, other in zip(together, alone, strict=True))
    assert not same(together[0], together[1])


def test_token_ids_and_lists_of_them(surface: Surface) -> None:
    (one,) = vectors(surface, input=[5, 6, 7])
    several = vectors(surface, input=[[5, 6, 7], [8, 9]])
    assert same(one, several[0])
    assert embedding_answer(surface.embed(input=[[5, 6, 7], [8, 9]]))["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("input", ["wake me up at six am", TEXTS], ids=["one", "several"])
def test_base64_is_the_same_vectors_as_little_endian_float32(surface: Surface, input: object) -> None:  # noqa: A002
    reply = surface.embed(input=input, encoding_format="base64")
    assert reply.status == 200
    for item, plain in zip(reply.json["data"], vectors(surface, input=input, encoding_format="float"), strict=True):
        raw = base64.b64decode(item["embedding"], validate=True)
        assert same(list(struct.unpack(f"<{len(raw) // 4}f", raw)), plain)


def test_floats_are_the_default(surface: Surface) -> None:
    assert same(vectors(surface, encoding_format=None)[0], vectors(surface, encoding_format="float")[0])


def test_the_models_own_number_of_dimensions_may_be_named(surface: Surface) -> None:
    size = len(vectors(surface)[0])
    assert len(vectors(surface, dimensions=size)[0]) == size
    assert len(vectors(surface, dimensions=None)[0]) == size
    error(surface.embed(dimensions=size - 1), 400, param="dimensions")
    error(surface.embed(dimensions=size + 1), 400, param="dimensions")


def test_usage_is_the_sum_of_the_texts(surface: Surface) -> None:
    alone = [embedding_answer(surface.embed(input=text))["usage"]["prompt_tokens"] for text in TEXTS]
    assert embedding_answer(surface.embed(input=TEXTS))["usage"]["prompt_tokens"] == sum(alone)


def test_a_long_list(surface: Surface) -> None:
    """Longer than any queue of requests."""
    found = vectors(surface, input=[[5 + index % 50] for index in range(400)])
    assert len(found) == 400
    assert same(found[3], found[53])


def test_fields_that_change_nothing_are_accepted(surface: Surface) -> None:
    embedding_answer(surface.embed(user="ann", something_of_another_server=1))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [5, 99_999_999]}, None),
        ({"input": "word " * 9000}, None),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "many"}, "dimensions"),
        ({"dimensions": 10**12}, "dimensions"),
        ({"model": None}, "model"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_an_invalid_request_is_400(surface: Surface, fields: dict[str, object], param: str | None) -> None:
    found = error(surface.embed(**fields), 400)
    assert param in (None, found["param"]), found


def test_an_unknown_model_is_404(surface: Surface) -> None:
    error(surface.embed(model="nothing"), 404, code="model_not_found", param="model")


def test_a_model_that_makes_no_vectors_is_400(surface: Surface) -> None:
    found = error(surface.embed(model="no-vectors"), 400, code="unsupported_feature")
    assert "embedding" in found["message"]
