#!/bin/sh
# llguidance 1.9.1 (PyPI): a schema that names draft 7 in `$schema` loses its `prefixItems`, without an error or a
# warning.
#
# Guess: the keyword is unknown in draft 7, so it is refused like other keywords that llguidance does not know
# ("Unimplemented keys"), or it is held whatever `$schema` says.
# Seen: with draft-07 named, `["x", 1]` is accepted for a tuple of a number and a string, and without `$schema`, or with
# 2020-12, it is refused. A validator of draft 7 ignores the keyword, too, so the answer is valid by the letter; a client
# that puts today's keyword under yesterday's `$schema`, as generators do, gets answers of another shape.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
TUPLE = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2}


def accepted(schema, text):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.get_grammar_warnings() == []
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


drafts = ("", "https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#")
for draft in drafts:
    schema = {"$schema": draft, **TUPLE} if draft else TUPLE
    swapped, right = accepted(schema, '["x", 1]'), accepted(schema, '[1, "x"]')
    print(f"{draft or 'no $schema'}: right order {right}, swapped {swapped}")
    assert right
    assert swapped is (draft == drafts[2])
PYTHON
