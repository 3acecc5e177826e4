"""The classes of personal values, and a value's place in a text."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

PiiClass = Literal["email", "phone", "card", "iban", "ip", "mac", "name", "address"]
GuardClass = Literal["email", "phone", "card", "iban", "ip", "mac", "name", "address", "secret"]
PII_CLASSES: Final[tuple[PiiClass, ...]] = get_args(PiiClass)
GUARD_CLASSES: Final[tuple[GuardClass, ...]] = get_args(GuardClass)


class Found(NamedTuple):
    """A value in a text: its place and its class."""

    start: int
    end: int
    kind: GuardClass
