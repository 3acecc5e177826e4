#!/bin/sh
# common-expression-language 0.10.0 (PyPI; a Rust core): `size()` of a string is its length in UTF-8 bytes.
#
# Guess: the number of code points, as CEL's specification says ("size: string length in Unicode code points") and as
# the library's own regular expressions count: `matches("^.$")` takes one character for one.
# Seen: an e with an acute accent has size 2. A limit such as `size(x) <= 280` is therefore half as long in Greek.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet common-expression-language==0.10.0
"$folder/venv/bin/python" - <<'PYTHON'
from cel import evaluate

for text in ("e", "\u00e9", "\u03b1\u03b2\u03b3"):
    size, one = evaluate("size(t)", {"t": text}), evaluate('t.matches("^.$")', {"t": text})
    print(f"{text!a}: code points {len(text)}, size() {size}, matches one '.': {one}")
    assert size == len(text.encode())
assert evaluate('t.matches("^.$")', {"t": "\u00e9"}) is True
PYTHON
