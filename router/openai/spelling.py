"""Refuses names that look like one of ours: a misspelt `temperature` would be passed on, misspelt `tags` would be lost.

Other unknown names stay allowed: fields of other servers travel on in `Request.extra`, and foreign headers are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Final

import msgspec

from ..errors import UnknownField
from .wire import WireRoutingHints

HINTS: Final = tuple(field.encode_name for field in msgspec.structs.fields(WireRoutingHints))
# Fields that other servers accept (`models`: OpenRouter's fallbacks), although they look like one of OpenAI's.
_OTHER_SERVERS: Final = frozenset({"models"})
# One letter wrong in a name of four, two in a long one. `min_tokens` and `top_a`, which vLLM and others accept, are
# further from `max_tokens` and `top_p`.
_FIELD_SIMILARITY: Final = 0.87
_OURS_SIMILARITY: Final = 0.75  # no other API uses these names
_HEADER: Final = "x-causeway-"


def check_field_names(unknown: Iterable[str], known: frozenset[str]) -> None:
    """Raises UnknownField for the first unknown field of the body that looks like a known one or like a routing hint.

    Args:
        known: the fields of this kind of request; the set is reused, so that results can be remembered.
    """
    for name in unknown:
        problem = _field_problem(name[:64], known)
        if problem:
            raise UnknownField(f"`{name[:64]}` is not a known field{problem}", param=name[:64])


def check_header_names(headers: Mapping[str, str], known: frozenset[str]) -> None:
    """Raises UnknownField for an ``x-causeway-`` header that looks like one of `known` (lower case)."""
    for name in headers:
        if name[:11].lower() == _HEADER and name.lower() not in known:
            near = _near(name.lower().removeprefix(_HEADER), [header.removeprefix(_HEADER) for header in known], 0.7)
            if near:
                raise UnknownField(
                    f"`{name[:64]}` is not a known header, did you mean `{_HEADER}{near}`?", param=name[:64]
                )


def hint_advice(name: str) -> str:
    """Return how to mend an unknown key of the object `causeway`."""
    near = _near(name, HINTS, 0.6)
    return f", did you mean `{near}`?" if near else f". Known are {', '.join(HINTS)}."


@lru_cache(maxsize=1024)
def _field_problem(name: str, known: frozenset[str]) -> str:
    plain = name.lower().replace("-", "_")
    if plain.startswith(("causeway", "x_causeway")):
        return ". Put routing hints into the object `causeway`."
    if hint := _near(plain, ("causeway",), _OURS_SIMILARITY):
        return f", did you mean `{hint}`?"
    if plain in HINTS:
        return f". Routing hints belong into the object `causeway`: write `causeway.{plain}`."
    if plain in _OTHER_SERVERS:
        return ""
    near = _near(plain, known, _FIELD_SIMILARITY)
    if near:
        return f", did you mean `{near}`?"
    hint = _near(plain, ("prefer", "deadline_ms"), _OURS_SIMILARITY)
    return f", did you mean `causeway.{hint}`?" if hint else ""


def _near(name: str, known: Iterable[str], similarity: float) -> str:
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=similarity)), "")
