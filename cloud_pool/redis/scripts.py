"""Read Lua scripts for Redis from the .lua files of a folder."""

from __future__ import annotations

from importlib.resources import files


def load_script(package: str, name: str, *shared: str) -> str:
    """Return the text of `<name>.lua` in `package`, preceded by `shared`. A `#!lua` line stays the first line."""
    text = (files(package) / f"{name}.lua").read_text("utf-8")
    shebang, _, body = text.partition("\n") if text.startswith("#!") else ("", "", text)
    return "".join((f"{shebang}\n" if shebang else "", *shared, body))
