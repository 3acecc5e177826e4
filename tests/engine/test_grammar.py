"""JSON schemas as grammars: what is understood, bounded and refused. What answers look like is in test_constrained."""

from __future__ import annotations

import pytest

from models.llama_cpp.sampling.json_schema import schema_to_gbnf
from router.errors import InvalidGrammar


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not an object"),
        ('{"type":"unheard"}', "unheard"),
        ('{"type":"object","properties":{"a":{"type":"array","items":{"not":{}}}}}', "#/properties/a/items/not"),
        ('{"type":"object","properties":{"a":{"type":"string","maxLength":1000000000}}}', "#/properties/a/maxLength"),
        ('{"type":"array","items":{"type":"null"},"minItems":3,"maxItems":1}', "#/maxItems"),
        ('{"type":"string","pattern":"^a{1,99999999}$"}', "#/pattern"),
        ('{"type":"string","pattern":"a(?=b)"}', "Pattern must start"),
        ('{"$ref":"https://example.com/x.json"}', "#/$ref"),
        ('{"$ref":"#/$defs/missing"}', "missing"),
        ('{"enum":[]}', "#/enum"),
        ('{"type":"object","properties":{"a":false}}', "#/properties/a"),
        ('{"type":"object","properties":[]}', "#/properties"),
        ('{"type":"object","required":"a"}', "#/required"),
        ('{"anyOf":[]}', "#/anyOf"),
        ('{"items":' * 40 + "{}" + "}" * 40, "too deep"),
        ('{"type":"object","properties":{' + ",".join(f'"{i}":true' for i in range(3000)) + "}}", "too large"),
        ('{"description":"' + "x" * 70_000 + '"}', "characters"),
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_refused_with_its_place(schema: str, place: str) -> None:
    """The error is a 400 whose message leads to what is wrong."""
    with pytest.raises(InvalidGrammar) as caught:
        schema_to_gbnf(schema)
    assert place in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_schema")


def test_a_small_range_of_whole_numbers_is_listed() -> None:
    """The converter knows no bounds: few numbers are written out, many are at least not negative."""
    assert '"1" | "2" | "3"' in schema_to_gbnf('{"type":"integer","minimum":1,"maximum":3}')
    assert '"-"' not in schema_to_gbnf('{"type":"integer","minimum":0}').split("root ::= ")[1].splitlines()[0]


def test_values_without_a_schema_nest_only_so_deep() -> None:
    """No rule for any value leads back to itself."""
    rules = dict(line.split(" ::= ", 1) for line in schema_to_gbnf("{}").splitlines())
    names = sorted(rules, key=len, reverse=True)

    def reaches(name: str, seen: tuple[str, ...] = ()) -> None:
        assert name not in seen, "a value can nest for ever"
        for other in names:
            if f" {other} " in f" {rules[name]} ".replace("*", " ").replace("?", " ").replace(")", " "):
                reaches(other, (*seen, name))

    reaches("root")


def test_the_words_of_a_type_list_keep_the_rest_of_the_schema() -> None:
    """`["string","null"]` with an enum is the enum; with a length each string has it."""
    assert schema_to_gbnf('{"type":["string","null"],"enum":["a",null]}').startswith('root ::= "\\"a\\"" | "null"')
    assert "char char char" in schema_to_gbnf('{"type":["string","null"],"minLength":3}')
