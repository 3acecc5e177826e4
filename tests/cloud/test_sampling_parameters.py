from __future__ import annotations

import json

import pytest

from cloud_pool.upstreams.triton.sampling_parameters import Guided, decode, encode, from_request
from router.errors import InvalidRequest
from router.types import Request, Sampling

CHAT = Request(kind="chat", model="large")


def test_what_the_gateway_writes_is_what_the_model_reads() -> None:
    """Every sampling field survives the way through the tensor."""
    sampling = Sampling(0.5, 0.9, 40, 0.05, 0.1, 0.2, 1.1, 7, ((3, -100.0), (9, 2.5)))
    request = Request(kind="chat", model="large", sampling=sampling, stop=("a", "b"), n=2, logprobs=3, max_tokens=11)
    read = decode(
        encode(from_request(request, max_tokens=99, schema='{"type":"object"}', guided_key="guided_decoding"))
    )
    assert read.sampling(0) == sampling
    assert read.stops == ("a", "b")
    assert (read.n, read.logprobs, read.max_tokens) == (2, 3, 11)
    assert json.loads(read.guided.schema) == {"type": "object"}


def test_grammar_travels_as_the_vllm_backend_takes_it() -> None:
    """The backend decodes a JSON document out of a string, under the key of its release."""
    written = json.loads(
        encode(from_request(CHAT, max_tokens=5, schema='{"type":"string"}', guided_key="structured_outputs"))
    )
    assert json.loads(written["structured_outputs"]) == {"json": {"type": "string"}}


def test_max_tokens_is_always_said() -> None:
    """vLLM's default of 16 tokens is never what a caller meant."""
    assert json.loads(encode(from_request(CHAT, max_tokens=16, schema="", guided_key="guided_decoding"))) == {
        "max_tokens": 16
    }


def test_each_of_n_sequences_draws_anew() -> None:
    """One seed gives n different sequences, the same ones each time."""
    parameters = decode('{"n": 3, "seed": 5}')
    assert [parameters.sampling(index).seed for index in range(3)] == [5, 6, 7]


def test_numbers_may_come_as_strings() -> None:
    """The backend's own examples write them so."""
    assert decode('{"temperature": "0.1", "max_tokens": "100"}').max_tokens == 100


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ('{"temperatur": 1}', "temperatur"),
        ('{"n": 0}', "n"),
        ('{"n": 1000}', "n"),
        ('{"logit_bias": {"x": 1}}', "logit_bias"),
        ('{"max_tokens": "many"}', "max_tokens"),
        ("[]", "sampling_parameters"),
        ("{", "sampling_parameters"),
    ],
)
def test_bad_parameters_are_refused_by_name(document: str, said: str) -> None:
    """A wrong key or value is an InvalidRequest that names it."""
    with pytest.raises(InvalidRequest, match=said):
        decode(document)


@pytest.mark.parametrize("guided", ['{"json": [1]}', '{"json": "nonsense"}', '{"grammer": "x"}', "{"])
def test_a_schema_that_is_no_object_is_refused(guided: str) -> None:
    """A grammar that cannot be read is an InvalidRequest, not a free text."""
    parameters = decode(json.dumps({"guided_decoding": guided}))
    with pytest.raises(InvalidRequest):
        _ = parameters.guided.schema


def test_a_schema_may_be_text_inside_text() -> None:
    """vLLM takes a schema as an object or as a string that holds one."""
    inner = json.dumps({"json": json.dumps({"type": "object"})})
    assert decode(json.dumps({"guided_decoding": inner})).guided.schema == '{"type": "object"}'


def test_any_object_is_a_schema_of_its_own() -> None:
    """`json_object` is the schema that every JSON object obeys."""
    assert Guided(json_object=True).schema == "{}"
    assert Guided().schema == ""


def test_only_known_extras_are_passed_on() -> None:
    """`ignore_eos` is vLLM's and ours; other fields that we do not know stay behind."""
    request = Request(kind="chat", model="large", extra='{"ignore_eos":true,"stray":1}')
    assert json.loads(encode(from_request(request, max_tokens=5, schema="", guided_key="guided_decoding"))) == {
        "ignore_eos": True,
        "max_tokens": 5,
    }
    bad = Request(kind="chat", model="large", extra='{"ignore_eos":"perhaps"}')
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        from_request(bad, max_tokens=5, schema="", guided_key="guided_decoding")


def test_the_models_own_temperature_holds_where_the_caller_names_none() -> None:
    """What the caller says goes before it."""
    silent = from_request(CHAT, max_tokens=5, schema="", guided_key="guided_decoding", temperature=0.0)
    assert json.loads(encode(silent))["temperature"] == 0.0
    said = Request(kind="chat", model="large", sampling=Sampling(temperature=0.5))
    assert from_request(said, max_tokens=5, schema="", guided_key="guided_decoding", temperature=0.0).temperature == 0.5


def test_what_holds_a_call_travels_where_nothing_else_holds_the_answer() -> None:
    """The utterance, and how the answer began; a schema of the caller's comes before them."""
    written = from_request(
        CHAT, max_tokens=5, schema="", guided_key="guided_decoding", copy_source="at six", answer_prefix='{"name"'
    )
    assert decode(encode(written)).guided == Guided(copy_source="at six", answer_prefix='{"name"')
    written = from_request(CHAT, max_tokens=5, schema="{}", guided_key="guided_decoding", copy_source="at six")
    assert decode(encode(written)).guided == Guided(json_object=True)
    silent = from_request(CHAT, max_tokens=5, schema="", guided_key="guided_decoding", copy_source="")
    assert decode(encode(silent)).guided.copy_source == "", "nothing was said: no argument can be"
