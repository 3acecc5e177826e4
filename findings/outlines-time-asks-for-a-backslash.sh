#!/bin/sh
# outlines_core 0.2.14: under `format: time` a fraction of a second must follow a backslash.
#
# Guess: the expression for times lets ".5" follow the seconds, as RFC 3339 does and as its own `format: date-time` does
# with three digits.
# Seen: the point is escaped twice, so it means a backslash and then any character. An index of the schema refuses
# "12:00:00.5Z", a time, and accepts the same with a backslash before the point, which no JSON parser reads. Both formats
# refuse an offset such as +01:00.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/walk.py" <<'PYTHON'
import json

from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

CHARACTERS = [chr(code) for code in range(32, 127)]
VOCABULARY = Vocabulary(0, {each: [number] for number, each in enumerate(CHARACTERS, 1)})


def accepts(kind, text):
    guide = Guide(Index(build_regex_from_schema(json.dumps({"type": "string", "format": kind})), VOCABULARY))
    for each in text:
        token = CHARACTERS.index(each) + 1
        if token not in guide.get_tokens():
            return False
        guide.advance(token)
    return guide.is_finished() or 0 in guide.get_tokens()


for kind, text in (
    ("time", '"12:00:00Z"'),
    ("time", '"12:00:00.5Z"'),
    ("time", '"12:00:00\\.5Z"'),
    ("date-time", '"2026-01-01T12:00:00.500Z"'),
    ("date-time", '"2026-01-01T12:00:00+01:00"'),
):
    try:
        json.loads(text)
        form = "JSON"
    except ValueError:
        form = "no JSON"
    print(kind, text, form, "accepted" if accepts(kind, text) else "refused")
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet outlines_core==0.2.14
seen=$("$folder/venv/bin/python" "$folder/walk.py")
printf "%s\n" "$seen"
[ "$seen" = 'time "12:00:00Z" JSON accepted
time "12:00:00.5Z" JSON refused
time "12:00:00\.5Z" no JSON accepted
date-time "2026-01-01T12:00:00.500Z" JSON accepted
date-time "2026-01-01T12:00:00+01:00" JSON refused' ]
