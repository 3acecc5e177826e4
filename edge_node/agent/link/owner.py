"""Root's commands on a state folder work with the rights of the account that owns it.

The daemon runs as an account of its own, and root joins or imports for it. What that account may write could be a link
to a file of root's: with the account's own rights, a command can only reach what the account could reach anyway, and
what it makes belongs to the account.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def as_owner(state_dir: Path) -> Iterator[Path]:
    """Yield the path of `state_dir` to use meanwhile. No-op but for root, on another account's folder.

    The path goes through a file descriptor: systemd keeps the folders of its accounts below one that they cannot enter.

    Raises:
        OSError: the folder cannot be opened.
    """
    if os.geteuid() != 0 or not state_dir.exists() or (owner := state_dir.stat()).st_uid == 0:
        yield state_dir
        return
    folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    groups, group = os.getgroups(), os.getegid()
    try:
        os.setgroups([])
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
        yield Path(f"/proc/self/fd/{folder}")
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
        os.close(folder)
