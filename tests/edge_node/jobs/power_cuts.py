"""The recorded operations of an outbox, and the folders that a power cut may leave.

What was synced is there. Of the rest anything may be: each write whole, half, or not at all, without the others. A file
has its name for good once its folder was synced, and has lost it for good in the same way.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import msgspec

from .killed_outbox import NOTES

_HEAD = struct.Struct("<cIqq")


class Operation(msgspec.Struct, frozen=True):
    """`kind`: w write, t truncate, s sync, u unlink. `name` "" is the folder. `offset` -1: at the end."""

    kind: str
    name: str
    offset: int
    data: bytes


def read_log(path: Path) -> list[Operation]:
    log, at, found = path.read_bytes(), 0, []
    while at < len(log):
        kind, name_bytes, offset, size = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        name, data = log[at : at + name_bytes].decode(), log[at + name_bytes : at + name_bytes + max(0, size)]
        at += name_bytes + max(0, size)
        found.append(Operation(kind.decode(), name, offset, data))
    return found


def build(place: Path, operations: list[Operation], cut: int, chance: random.Random) -> list[str]:
    """Write into `place` what may be left if the power goes before operation `cut`; return the notes until then."""
    done = operations[:cut]
    greedy = chance.random()  # how much of what was not synced is there
    folder_synced = max((at for at, one in enumerate(done) if one.kind == "s" and not one.name), default=-1)
    place.mkdir(parents=True)
    for name in {one.name for one in done} - {"", NOTES}:
        own = [(at, one) for at, one in enumerate(done) if one.name == name]
        if own[0][0] > folder_synced and chance.random() >= greedy:
            continue
        synced = max((at for at, one in own if one.kind == "s"), default=-1)
        content: bytearray | None = bytearray()
        for at, one in own:
            if at < (folder_synced if one.kind == "u" else synced) or chance.random() < greedy:
                content = _apply(content, one, one.data)
            elif one.kind == "w" and chance.random() < 0.5:
                content = _apply(content, one, one.data[: len(one.data) // 2])
        if content is not None:
            (place / name).write_bytes(content)
    return b"".join(one.data for one in done if one.name == NOTES).decode().splitlines()


def _apply(content: bytearray | None, one: Operation, data: bytes) -> bytearray | None:
    if one.kind == "u":
        return None
    content = bytearray() if content is None else content
    if one.kind == "t":
        del content[one.offset :]
        content.extend(bytes(one.offset - len(content)))
    elif one.kind == "w":
        content.extend(bytes(max(0, one.offset - len(content))))
        content[one.offset : one.offset + len(data)] = data
    return content
