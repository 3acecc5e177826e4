#!/bin/sh
# llguidance 1.9.1 (PyPI): bounds of integers pass through a 64-bit float.
#
# Guess: the automaton for `minimum` and `maximum` is built from the digits of the schema, so it is exact at any length.
# Seen: above 2**53 a bound is rounded first. `minimum: 9007199254740993` accepts 9007199254740992, and `maximum:
# 9007199254740993` refuses that very number. Identifiers of 64 bits (snowflakes, nanoseconds) are such numbers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepted(schema, number):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps({"type": "integer", **schema})))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_bytes(str(number).encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


bound = 2**53 + 1
for schema, number in (({"minimum": bound}, bound - 1), ({"maximum": bound}, bound)):
    print(f"{schema}: {number} accepted: {accepted(schema, number)}")
assert accepted({"minimum": bound}, bound - 1)
assert not accepted({"maximum": bound}, bound)
small = 2**50 + 1
assert accepted({"maximum": small}, small) and not accepted({"minimum": small}, small - 1)
print(f"the same bounds at {small}: exact")
PYTHON
