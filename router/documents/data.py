"""The data files that lie beside the modules of a package."""

from __future__ import annotations

import pkgutil
from typing import TypeVar

import msgspec

T = TypeVar("T")


def text_of(package: str, name: str) -> str:
    return (pkgutil.get_data(package, name) or b"").decode()


def table_of(package: str, name: str, kind: type[T]) -> T:
    """Return the content of a JSON or YAML file; `kind` is its type."""
    decode = msgspec.yaml.decode if name.endswith(".yaml") else msgspec.json.decode
    return decode(text_of(package, name), type=kind)
