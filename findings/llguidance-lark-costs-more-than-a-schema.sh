#!/bin/sh
# llguidance 1.9.1 (PyPI; a Rust core): a Lark grammar has a fixed price, whatever is in it; a JSON schema has none.
#
# Guess: the time to compile grows with the grammar, and a schema, which is turned into a grammar first, takes longer
# than the same grammar in llguidance's own language.
# Seen: `start: "a"` takes eight times as long as the schema {"const": "a"}, and longer than a schema of an object with
# an integer and an enumeration; a regular expression costs what Lark costs. So a server that compiles one grammar for
# each request (values copied from its text, say) halves that time when it writes them as schemas.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import time

from llguidance import LLMatcher, LLTokenizer

COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
OBJECT = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["metre", "mile"]}},
    "required": ["count", "unit"],
    "additionalProperties": False,
}
GRAMMARS = {
    'Lark, start: "a"': LLMatcher.grammar_from_lark('start: "a"\n'),
    "regular expression a": LLMatcher.grammar_from_regex("a"),
    'schema {"const": "a"}': LLMatcher.grammar_from_json_schema({"const": "a"}, COMPACT),
    "schema of an object": LLMatcher.grammar_from_json_schema(OBJECT, COMPACT),
}
tokenizer = LLTokenizer("byte")


def shortest_us(grammar):
    """Return the shortest of 100 times, which neighbours on the machine disturb least."""
    times = []
    for _ in range(100):
        started = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        times.append(time.perf_counter() - started)
        assert not matcher.is_error(), matcher.get_error()
    return 1e6 * min(times)


lark, regex, const, schema = (shortest_us(grammar) for grammar in GRAMMARS.values())
for name, us in zip(GRAMMARS, (lark, regex, const, schema)):
    print(f"{name}: {us:.0f} us, {us / const:.1f} x the shortest")
assert lark > 4 * const and regex > 4 * const and lark > 1.5 * schema
PYTHON
