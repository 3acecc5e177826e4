from __future__ import annotations

import itertools
import json

import pytest

from causeway_server.cloud_pool.triton_server.model_runtime import ModelRequest, jobs_of
from causeway_server.cloud_pool.upstreams.triton.messages import Guided, from_request
from causeway_server.cloud_pool.upstreams.triton.messages import decode_parameters as decode
from causeway_server.cloud_pool.upstreams.triton.messages import encode_parameters as encode
from causeway_server.router.errors import InvalidRequest
from causeway_server.router.types import Request, Sampling

CHAT = Request(kind="chat", model="large")


def test_parameters_round_trip() -> None:
    sampling = Sampling(0.5, 0.9, 40, 0.05, 0.1, 0.2, 1.1, 7, ((3, -100.0), (9, 2.5)))
    request = Request(kind="chat", model="large", sampling=sampling, stop=("a", "b"), n=2, logprobs=3, max_tokens=11)
    read = decode(
        encode(from_request(request, max_tokens=99, schema='{"type":"object"}', guided_key="guided_decoding"))
    )
    assert read.sampling(0) == sampling
    assert read.stops == ("a", "b")
    assert (read.n, read.logprobs, read.max_tokens) == (1, 3, 11)  # each of the n sequences is a call of its own
    assert json.loads(read.guided.schema) == {"type": "object"}


def test_grammar_is_a_json_document_inside_a_string() -> None:
    """Under the key of the vLLM release."""
    written = json.loads(
        encode(from_request(CHAT, max_tokens=5, schema='{"type":"string"}', guided_key="structured_outputs"))
    )
    assert json.loads(written["structured_outputs"]) == {"json": {"type": "string"}}


def test_max_tokens_is_always_written() -> None:
    """vLLM's default of 16 is never intended."""
    assert json.loads(encode(from_request(CHAT, max_tokens=16, schema="", guided_key="guided_decoding"))) == {
        "max_tokens": 16
    }


def test_an_adapter_has_the_name_that_the_vllm_backend_reads() -> None:
    parameters = from_request(CHAT, max_tokens=5, schema="", guided_key="guided_decoding", adapter="legal")
    assert json.loads(encode(parameters))["lora_name"] == "legal"
    (job,) = jobs_of(ModelRequest(prompt="a", parameters=decode(encode(parameters))), itertools.count(1))
    assert job.adapter == "legal"


def test_each_of_n_sequences_has_a_seed_of_its_own() -> None:
    parameters = decode('{"n": 3, "seed": 5}')
    assert [parameters.sampling(index).seed for index in range(3)] == [5, 6, 7]


def test_numbers_may_be_strings() -> None:
    """As in the backend's examples."""
    assert decode('{"temperature": "0.1", "max_tokens": "100"}').max_tokens == 100


@pytest.mark.parametrize(
    ("document", "name"),
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
def test_error_of_a_bad_parameter_names_it(document: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        decode(document)


@pytest.mark.parametrize("guided", ['{"json": [1]}', '{"json": "nonsense"}', '{"grammer": "x"}', "{"])
def test_schema_that_is_not_an_object_is_refused(guided: str) -> None:
    parameters = decode(json.dumps({"guided_decoding": guided}))
    with pytest.raises(InvalidRequest):
        _ = parameters.guided.schema


def test_a_schema_may_be_text_inside_text() -> None:
    """vLLM takes a schema as an object or as a string that holds one."""
    inner = json.dumps({"json": json.dumps({"type": "object"})})
    assert decode(json.dumps({"guided_decoding": inner})).guided.schema == '{"type": "object"}'


def test_json_object_is_the_schema_of_any_object() -> None:
    assert Guided(json_object=True).schema == "{}"
    assert Guided().schema == ""


def test_only_known_extensions_are_passed_on() -> None:
    """`ignore_eos` is vLLM's and ours; other unknown fields are dropped."""
    request = Request(kind="chat", model="large", extra='{"ignore_eos":true,"stray":1}')
    assert json.loads(encode(from_request(request, max_tokens=5, schema="", guided_key="guided_decoding"))) == {
        "ignore_eos": True,
        "max_tokens": 5,
    }
    bad = Request(kind="chat", model="large", extra='{"ignore_eos":"perhaps"}')
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        from_request(bad, max_tokens=5, schema="", guided_key="guided_decoding")


def test_models_temperature_is_the_default() -> None:
    silent = from_request(CHAT, max_tokens=5, schema="", guided_key="guided_decoding", temperature=0.0)
    assert json.loads(encode(silent))["temperature"] == 0.0
    request = Request(kind="chat", model="large", sampling=Sampling(temperature=0.5))
    warm = from_request(request, max_tokens=5, schema="", guided_key="guided_decoding", temperature=0.0)
    assert warm.temperature == 0.5


def test_copy_source_is_sent_without_a_schema() -> None:
    """A schema takes precedence."""
    written = from_request(CHAT, max_tokens=5, schema="", guided_key="guided_decoding", copy_source="at six")
    assert decode(encode(written)).guided == Guided(copy_source="at six")
    written = from_request(CHAT, max_tokens=5, schema="{}", guided_key="guided_decoding", copy_source="at six")
    assert decode(encode(written)).guided == Guided(json_object=True)
    silent = from_request(CHAT, max_tokens=5, schema="", guided_key="guided_decoding", copy_source="")
    assert decode(encode(silent)).guided.copy_source == "", "an empty message leaves nothing to copy"
