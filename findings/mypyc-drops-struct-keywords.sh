#!/bin/sh
# mypyc (mypy 2.4.1) with msgspec 0.22.0: a compiled Struct loses the keywords of its class statement.
#
# Guess: a class whose metaclass is not Python's own compiles as a class that is not native, which mypyc supports; it
# means what it means interpreted, and `frozen=True` and `omit_defaults=True` stay in force.
# Seen: the keywords are dropped without a message at compile time or at import. The compiled struct takes assignments,
# cannot be hashed, and encodes the fields that have their defaults. So a module can be compiled only if its structs
# stand in another one that is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/points.py" <<'PYTHON'
import msgspec


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    x: int = 0
    y: int = 0
PYTHON
cat > "$folder/look.py" <<'PYTHON'
import msgspec

import points

point = points.Point(1)
seen = {"compiled": points.__file__.endswith(".so"), "json": msgspec.json.encode(point).decode()}
try:
    point.x = 2
    seen["frozen"] = False
except AttributeError:
    seen["frozen"] = True
try:
    seen["hash"] = isinstance(hash(point), int)
except TypeError:
    seen["hash"] = False
print(seen)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mypy==2.4.1 msgspec==0.22.0 setuptools==84.2.1
cd "$folder"
interpreted=$(venv/bin/python look.py)
venv/bin/mypyc points.py > build.log 2>&1
compiled=$(venv/bin/python look.py)
echo "interpreted: $interpreted"
echo "compiled:    $compiled"
[ "$interpreted" = "{'compiled': False, 'json': '{\"x\":1}', 'frozen': True, 'hash': True}" ]
[ "$compiled" = "{'compiled': True, 'json': '{\"x\":1,\"y\":0}', 'frozen': False, 'hash': False}" ]
