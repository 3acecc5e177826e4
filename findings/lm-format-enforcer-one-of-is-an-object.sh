#!/bin/sh
# lm-format-enforcer 0.11.3: `oneOf` without objects lets a model write objects only.
#
# Guess: `oneOf` of an integer and a boolean admits what `anyOf` of the two does, or is refused as not supported.
# Seen: it admits every object and neither an integer nor a boolean. A property of a declared type (integer) whose values
# `oneOf` narrows must be an object, too. So a model that follows the enforcer cannot write one valid answer, and nothing
# says so when the schema is read.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/walk.py" <<'PYTHON'
from lmformatenforcer import JsonSchemaParser

KINDS = [{"type": "integer"}, {"type": "boolean"}]


def accepts(schema, text):
    parser = JsonSchemaParser(schema)
    for each in text:
        if each not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(each)
    return parser.can_end()


NARROWED = {"type": "object", "properties": {"a": {"type": "integer", "oneOf": [{"const": 1}, {"const": 2}]}}}
for name, schema, texts in (
    ("anyOf", {"anyOf": KINDS}, ("5", "true", "{}")),
    ("oneOf", {"oneOf": KINDS}, ("5", "true", "{}", '{"x":1}')),
    ("property", NARROWED, ('{"a":1}', '{"a":{}}')),
):
    print(name, *(f"{text}={accepts(schema, text)}" for text in texts))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm-format-enforcer==0.11.3
seen=$("$folder/venv/bin/python" "$folder/walk.py")
printf "%s\n" "$seen"
[ "$seen" = 'anyOf 5=True true=True {}=False
oneOf 5=False true=False {}=True {"x":1}=True
property {"a":1}=False {"a":{}}=True' ]
