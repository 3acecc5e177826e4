"""The edge's form of a continue token: the token with which a client requests the rest of an answer that was cut short.

A target's token is valid for that target only, so the edge puts the target's name before it: ``large~<token>``. The
client repeats the same request with the token, and the target that made the start makes the rest.
"""

from __future__ import annotations

from typing import Final

from ..errors import InvalidRequest
from ..types import Target

PARAM: Final = "causeway.continue"
"""The path of the field in the request's body."""
_SEPARATOR: Final = "~"  # not allowed in a target's name


def join_token(target: str, token: str) -> str:
    return f"{target}{_SEPARATOR}{token}"


def split_token(resume: str) -> tuple[str, str]:
    """Return the target's name and the target's token; both are "" for a token that no edge has made."""
    target, _, token = resume.partition(_SEPARATOR)
    return (target, token) if token else ("", "")


def continuing_target(resume: str, targets: tuple[Target, ...]) -> Target:
    """Return the target that cut the answer short: no other target has its start.

    Raises:
        InvalidRequest: the token belongs to none of the targets.
    """
    name, _ = split_token(resume)
    for target in targets:
        if target.name == name and target.at == "cloud":
            return target
    raise InvalidRequest(
        f"`{PARAM}` belongs to no target of the active policy, or to another model. Send the question without it.",
        param=PARAM,
    )
