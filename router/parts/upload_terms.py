"""The fields of OpenAI's `POST /v1/files` beside the file. Source: https://platform.openai.com/docs/api-reference/files"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

import msgspec

from ..errors import InvalidRequest, MissingField, UnsupportedFeature
from ..numbers import whole_number

PartPurpose = Literal["user_data", "vision", "assistants"]
PART_PURPOSES: Final[tuple[PartPurpose, ...]] = get_args(PartPurpose)
"""Files that requests name as parts. All three mean the same here."""
CONTENT_KEPT: Final = "the content of files that requests name is not given back, as at OpenAI. Keep your own copy."
_MAX_NAME = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class UploadTerms(msgspec.Struct, frozen=True):
    """What an upload says about its file. `ttl_s`: how long it is kept; None: as long as any."""

    purpose: str
    ttl_s: int | None = None


def parse_upload_terms(fields: Mapping[str, str], purposes: Collection[str], max_ttl_s: float) -> UploadTerms:
    """Return the terms of an upload.

    Args:
        fields: of the form, without the file.
        purposes: those that are taken.
        max_ttl_s: the longest time that a file is kept.

    Raises:
        InvalidRequest: a field is invalid or missing.
    """
    names = ", ".join(purposes)
    purpose = fields.get("purpose", "")
    if not purpose:
        raise MissingField(f"`purpose` is missing. Send one of {names}.", param="purpose")
    if purpose not in purposes:
        raise UnsupportedFeature(f"`purpose` must be one of {names}, not {purpose[:64]!r}.", param="purpose")
    return UploadTerms(purpose, _ttl_s(fields, max_ttl_s))


def _ttl_s(fields: Mapping[str, str], max_ttl_s: float) -> int | None:
    anchor, text = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"`{_ANCHOR}` must be created_at.", param=_ANCHOR)
    ttl_s = whole_number(text or "", int(max_ttl_s))
    if not ttl_s:
        raise InvalidRequest(
            f"`{_SECONDS}` must be a whole number from 1 to {int(max_ttl_s)}, as long as a file is kept here.",
            param=_SECONDS,
        )
    return ttl_s


def clean_filename(name: str) -> str:
    """Return the last step of a file's name, on one line; "file" if nothing is left. It is shown, and never a path."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = " ".join("".join(character if character.isprintable() else " " for character in last).split())
    return shown[:_MAX_NAME] if shown.strip(".") else "file"
