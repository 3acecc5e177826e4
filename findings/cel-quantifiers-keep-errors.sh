#!/bin/sh
# common-expression-language 0.10.0 (PyPI; a Rust core): `exists` and `all` do not absorb errors, `||` and `&&` do.
#
# Guess: the macros are folds over `||` and `&&` (CEL's specification, "Macros": exists and all "absorb" an error if
# another element decides), so the order of a list cannot change whether a condition holds.
# Seen: `[2, 0].exists(x, 4 / x == 2)` is true, `[0, 2].exists(x, 4 / x == 2)` fails with a division by zero; the same
# terms written with `||` are true in both orders.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet common-expression-language==0.10.0
"$folder/venv/bin/python" - <<'PYTHON'
from cel import evaluate


def result(expression):
    try:
        return evaluate(expression, {})
    except ZeroDivisionError:
        return "ZeroDivisionError"


seen = {expression: result(expression) for expression in (
    "4 / 2 == 2 || 4 / 0 == 2", "4 / 0 == 2 || 4 / 2 == 2", "4 / 0 == 2 && 4 / 2 == 3",
    "[2, 0].exists(x, 4 / x == 2)", "[0, 2].exists(x, 4 / x == 2)",
    "[2, 0].all(x, 4 / x == 3)", "[0, 2].all(x, 4 / x == 3)",
)}
for expression, value in seen.items():
    print(f"{expression}  ->  {value}")
assert list(seen.values()) == [True, True, False, True, "ZeroDivisionError", False, "ZeroDivisionError"]
PYTHON
