#!/bin/sh
# outlines_core 0.2.14: a schema's `pattern` stands between the quotes as it is, so the text it admits need not be JSON.
#
# Guess: a pattern speaks of the string's value; a quote or a backslash in the value is escaped in the JSON text, as the
# same library does for the values of `enum` and `const`, and `"type": "string"` without a pattern leaves both out.
# Seen: the pattern of three arbitrary characters becomes those three between two quotes. A bare quote counts as one of
# them, which ends the string for a JSON parser; a backslash and a letter count as two, of which the parser makes one,
# so the value is shorter than the pattern says.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/match.py" <<'PYTHON'
import json
import re

from outlines_core.json_schema import build_regex_from_schema

expression = build_regex_from_schema(json.dumps({"type": "string", "pattern": "^.{3}$"}))
print(expression)
print(build_regex_from_schema(json.dumps({"const": 'a"b'})))
for text in ('"abc"', '"a"b"', '"a\\b"'):
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    print(text, "accepted" if re.fullmatch(expression, text) else "refused", "no JSON" if value is None else len(value))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet outlines_core==0.2.14
seen=$("$folder/venv/bin/python" "$folder/match.py")
printf "%s\n" "$seen"
[ "$seen" = '(".{3}")
"a\\"b"
"abc" accepted 3
"a"b" accepted no JSON
"a\b" accepted 2' ]
