"""Structs that threads read: msgspec describes each when it is first used, and two threads that do so at once crash.

Seen with msgspec 0.22.0, under the GIL: a thread finds the description that another one has not finished. So a struct
that is decoded or converted on a thread, beside the event loop or another thread, is described when it is imported.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def described(kind: type[T]) -> type[T]:
    """Let msgspec describe a struct, and all in its fields, before the first use. A class decorator. Raises NameError
    if a field's struct is the class itself, or is defined below it.
    """
    msgspec.json.Decoder(kind)
    return kind
