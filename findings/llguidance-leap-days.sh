#!/bin/sh
# llguidance 1.9.1 (PyPI): `format: date` knows the length of each month, yet not which years are leap years.
#
# Guess: a grammar of dates either allows any two digits as a day, or follows the calendar of RFC 3339.
# Seen: 30 February and 31 April are refused, in any year; 29 February is accepted in 2023 and in 2100, which do not
# have one. `format: time` accepts the second 60 in every minute of the day, where RFC 3339 (5.6, appendix D) has it
# only at the end of a UTC day. So a model whose output is constrained by such a schema can still produce a value that
# `datetime.date.fromisoformat` and `jsonschema`'s own format checker refuse.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
from datetime import date

from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepted(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def is_a_date(text):
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


seen = {day: accepted({"type": "string", "format": "date"}, f'"{day}"')
        for day in ("2024-02-29", "2024-02-30", "2023-04-31", "2023-02-29", "2100-02-29")}
for day, answer in seen.items():
    print(f"date {day}: llguidance {answer}, the calendar {is_a_date(day)}")
assert seen == {"2024-02-29": True, "2024-02-30": False, "2023-04-31": False, "2023-02-29": True, "2100-02-29": True}
checker = Draft202012Validator({"format": "date"}, format_checker=FormatChecker())
assert not checker.is_valid("2023-02-29") and checker.is_valid("2024-02-29")

for time in ("23:59:60Z", "12:00:60Z", "12:00:61Z"):
    print(f"time {time}: llguidance {accepted({'type': 'string', 'format': 'time'}, json.dumps(time))}")
assert accepted({"type": "string", "format": "time"}, '"12:00:60Z"')
assert not accepted({"type": "string", "format": "time"}, '"12:00:61Z"')
PYTHON
