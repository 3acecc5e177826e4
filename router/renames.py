"""Names of the previous version that were changed or removed: configuration, signals, metrics, commands.

One table, `renames.json`, serves the messages that refuse an old name, the commands that rewrite files
(`router.migrate`) and the page router/UPGRADING.md. Names in a device's state are in constants below, which the readers
of the state use.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

Kind = Literal["edge.yaml", "gateway.yaml", "fleet.yaml", "policy", "cases", "signal", "metric", "command", "extra"]


class Renamed(msgspec.Struct, frozen=True):
    """A name of the previous version. In keys, `NAME` stands for any key and `[]` for any item of a list.
    `per_million`: the new form of a price of 1,000 tokens, with `#` for that of a million; "" for others.
    """

    old: str  # the previous name
    new: str = ""  # the present name; "" if it was removed, or must be changed by hand
    values: Mapping[str, str] = {}  # the values whose names have changed, too
    advice: str = ""  # the advice for a name without a successor, or about the values of a new one; a sentence
    per_million: str = ""

    @property
    def note(self) -> str:
        """Advice in addition to the new name; "" if there is none."""
        return self.advice or " ".join(f"Its value `{old}` is now `{new}`." for old, new in self.values.items())

    @property
    def sentence(self) -> str:
        """The name and its successor as sentences of a message."""
        old = f"`{self.old.rpartition('.')[2] if is_pattern(self.old) else self.old}`"
        if not self.new:
            return f"{old} was removed. {self.note}"
        new = f"`{self.new.rpartition('.')[2] if is_pattern(self.old) else self.new}`"
        return f"{old} is now {new}. {self.note}".rstrip()


def is_pattern(path: str) -> bool:
    """Return whether the path of a key stands for several keys."""
    return "[]" in path or "NAME." in path


GATEWAY_METRICS = "causeway_cloud_"
"""The prefix of the gateway's metrics in the previous version."""

MOVED_CLOUD_KEYS: Mapping[str, str] = {"url": "url", "api_key": "key", "api_key_file": "key_file", "ca_file": "ca_file"}
"""The keys of the section `cloud` that are now those of each cloud in `clouds`."""

RENAMED: Mapping[Kind, tuple[Renamed, ...]] = msgspec.json.decode(
    pkgutil.get_data(__package__, "renames.json") or b"", type=dict[Kind, tuple[Renamed, ...]]
)
"""All names of the previous version, by kind. A fleet's settings are the keys of edge.yaml."""

TOKEN_TYPES: Mapping[str, str] = {"prompt": "input", "completion": "output"}
"""The values of the label `type` of metrics that count tokens."""
REWRITES: Mapping[Kind, str] = {
    "edge.yaml": "`causeway-edge migrate` rewrites the file.",
    "gateway.yaml": "`causeway-cloud migrate` rewrites the file.",
    "fleet.yaml": "`causeway-fleet lint --fix` rewrites the file.",
    "policy": "`causeway-fleet lint --fix` rewrites the file.",
    "cases": "`causeway-fleet lint --fix` rewrites the file.",
    "signal": "`causeway-fleet lint --fix` rewrites the file.",
}
"""The command that replaces the names in files."""

GOLDEN_IMAGE = "picture"
"""The key of a golden prompt's image in bundles of the previous version."""
IMAGES_TEXT = "pictures_text"
"""The field of the previous version's decision records that holds the signal `images.text`."""


def image_file_before(name: str) -> str:
    """Return the previous name of a golden prompt's image file, in the folder of an installed bundle."""
    return f"{GOLDEN_IMAGE}-{name.partition('-')[2]}"


@functools.cache
def _patterns(kind: Kind) -> tuple[tuple[re.Pattern[str], Renamed], ...]:
    quoted = ((re.escape(one.old).replace("NAME", ".+?").replace(r"\[\]", r"\[\d+\]"), one) for one in RENAMED[kind])
    return tuple((re.compile(pattern), one) for pattern, one in quoted)


def find(kind: Kind, name: str) -> Renamed | None:
    """Return the entry of a previous name or path of a key (``cases[3].snapshot.images``); None for any other."""
    return next((one for pattern, one in _patterns(kind) if pattern.fullmatch(name)), None)


def advice(kind: Kind, name: str, *, rewrites: bool = True) -> str:
    """Return advice about the successor of a previous name, in sentences; "" for other names. `rewrites`: whether it
    names the command that rewrites the file.
    """
    found = find(kind, name)
    if found is None:
        return ""
    return f"{found.sentence} {REWRITES.get(kind, '')}".rstrip() if rewrites else found.sentence
