"""JSON schemas as GBNF: what is supported, bounded and refused. test_constrained has the answers."""

from __future__ import annotations

import pytest

from models.llama_cpp.sampling.json_schema import schema_to_gbnf
from router.errors import InvalidGrammar


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not an object"),
        ('{"type":"unknown"}', "unknown"),
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
def test_an_unsupported_schema_is_refused_with_its_path(schema: str, message: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        schema_to_gbnf(schema)
    assert message in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_schema")


def test_a_small_integer_range_is_listed() -> None:
    """The converter has no bounds; of a large range only negative numbers are excluded."""
    assert '"1" | "2" | "3"' in schema_to_gbnf('{"type":"integer","minimum":1,"maximum":3}')
    assert '"-"' not in schema_to_gbnf('{"type":"integer","minimum":0}').split("root ::= ")[1].splitlines()[0]


def test_values_without_a_schema_have_a_bounded_depth() -> None:
    """No rule for any value is recursive."""
    rules = dict(line.split(" ::= ", 1) for line in schema_to_gbnf("{}").splitlines())
    names = sorted(rules, key=len, reverse=True)

    def reaches(name: str, seen: tuple[str, ...] = ()) -> None:
        assert name not in seen, "values nest without bound"
        for other in names:
            if f" {other} " in f" {rules[name]} ".replace("*", " ").replace("?", " ").replace(")", " "):
                reaches(other, (*seen, name))

    reaches("root")


def test_a_type_list_keeps_the_rest_of_the_schema() -> None:
    assert schema_to_gbnf('{"type":["string","null"],"enum":["a",null]}').startswith('root ::= "\\"a\\"" | "null"')
    assert "char char char" in schema_to_gbnf('{"type":["string","null"],"minLength":3}')
