"""The function catalogue: every function with its arguments, and a JSON schema for each.

`catalog.json` is made by `causeway-train catalog --data DIR`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import ArtifactError

from .dataset import Row
from .intents import OUT_OF_SCOPE, argument_name, functions_for, is_device_function

CATALOG = Path(__file__).parent / "catalog.json"


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One function; its arguments are optional texts."""

    name: str
    source: str  # the data set that it comes from
    device: bool = False  # answered by the device's model
    arguments: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The function's name in words."""
        return self.name.replace("_", " ")

    def tool(self) -> dict[str, object]:
        """Return an entry for `tools` of an OpenAI request."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema()}
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, object]:
        """Return the JSON schema (draft 2020-12) of the arguments: each a text or a list of texts."""
        text: dict[str, object] = {"type": "string", "minLength": 1}
        texts: dict[str, object] = {"type": "array", "items": text, "minItems": 2}
        return {
            "type": "object",
            "properties": {name: {"anyOf": [text, texts]} for name in self.arguments},
            "additionalProperties": False,
        }


def load_catalog(path: Path = CATALOG) -> tuple[FunctionSpec, ...]:
    """Read all functions, sorted by name.

    Raises:
        ArtifactError: the file is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[FunctionSpec, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path}: {error}") from error


def catalog_of(rows: Iterable[Row]) -> tuple[FunctionSpec, ...]:
    """Collect the functions that answer `rows`, with every argument that occurs."""
    arguments: dict[str, set[str]] = defaultdict(set)
    sources: dict[str, str] = {OUT_OF_SCOPE: "clinc150"}
    for row in rows:
        for name in functions_for(row.source, row.intent):
            # A merged CLINC150 intent names functions of other data sets; those data sets are the source.
            if name == row.intent or row.source != "clinc150":
                sources.setdefault(name, row.source)
        arguments[functions_for(row.source, row.intent)[0]].update(argument_name(slot) for slot, _ in row.slots)
    return tuple(
        FunctionSpec(name, source, is_device_function(name), tuple(sorted(arguments[name])))
        for name, source in sorted(sources.items())
    )


def save_catalog(catalog: Sequence[FunctionSpec], path: Path = CATALOG) -> None:
    """Write the catalogue as JSON, one function per line."""
    lines = b",\n".join(msgspec.json.encode(function) for function in catalog)
    path.write_bytes(b"[\n" + lines + b"\n]\n")
