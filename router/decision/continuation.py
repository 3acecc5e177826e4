"""The token with which the rest of an answer that was cut short is asked for, as the edge hands it on.

A target's own token is good for that target alone, so its name goes before it: ``large~<token>``. Whoever asks sends
the very request again with it, and the rest comes from where the start came from.
"""

from __future__ import annotations

from typing import Final

PARAM: Final = "causeway.continue"
_MARK: Final = "~"
"""No target's name has it."""


def marked(target: str, token: str) -> str:
    return f"{target}{_MARK}{token}"


def target_of(resume: str) -> str:
    """The target that cut the answer; "" for a token that is none of an edge's."""
    name, found, token = resume.partition(_MARK)
    return name if found and token else ""


def token_of(resume: str) -> str:
    """The target's own token."""
    return resume.partition(_MARK)[2]
