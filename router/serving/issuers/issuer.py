"""The keys of one issuer.

1. They are read every `refresh_s`, so that a key which the issuer withdraws is refused by then.
2. A token that none of them has signed may be of a newer key, under the same name too: then they are read at once, but
   at most once in `interval_s`. One loop reads, so tokens that come together wait for the same answer.
3. While the issuer is away the last keys stay in use, over a restart too with a copy on disk.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from ...errors import IdentityUnavailable
from ..folders import write_atomically
from ..tls.contexts import TlsFiles, client_tls
from .config import IssuerConfig
from .documents import UNREADABLE, DocumentsUnavailable, IssuerDocuments
from .keys import PublicKey, parse_jwks

_WAIT_S: Final = 15.0  # for newer keys: the interval and an answer
_AGAIN: Final = 2.0  # intervals until a failed reading is repeated
_MAX_WAITING: Final = 256
log = logging.getLogger(__name__)


class Issuer:
    """An issuer and its keys. Call `refresh` or `watch`, and `close`. `where`: its configuration key; `folder` keeps a
    copy of the keys, unless it is None. `revision`: number of changes of the `keys` in use; `last_error`: why the last
    reading failed; "" if it did not. Raises ConfigError if `ca_file` cannot be used.
    """

    def __init__(self, config: IssuerConfig, where: str, folder: Path | None = None) -> None:
        tls = client_tls(TlsFiles(where=where, ca_file=config.ca_file)) if config.ca_file else True
        self.config = config
        self.keys: tuple[PublicKey, ...] = ()
        self.revision = 0
        self.last_error = ""
        self._documents = IssuerDocuments(config.issuer, tls)
        self.close = self._documents.close
        self._jwks = b""
        name = hashlib.sha256(config.issuer.encode()).hexdigest()
        self._copy = None if folder is None else folder / f"{name}.json"
        self._begun = self._ended = 0  # counted readings
        self._wanted, self._read = anyio.Event(), anyio.Event()
        self._waiting = 0
        if self._copy is not None and self._copy.exists():
            with suppress(*UNREADABLE, OSError):  # it is written again
                self._use(self._copy.read_bytes())

    async def watch(self) -> None:
        """Read the keys whenever they are due, until cancelled (1, 2)."""
        while True:
            self._wanted = anyio.Event()
            await self.refresh()
            await anyio.sleep(self.config.interval_s)
            with anyio.move_on_after(_AGAIN * self.config.interval_s if self.last_error else self.config.refresh_s):
                await self._wanted.wait()

    async def refresh(self) -> None:
        """Read the keys. A failure is kept in `last_error`, never raised."""
        self._begun += 1
        number, failed = self._begun, ""
        try:
            jwks = await self._documents.keys()
            if self._use(jwks) and self._copy is not None:
                await to_thread.run_sync(_write, self._copy, jwks)
        except (DocumentsUnavailable, *UNREADABLE, OSError) as error:
            failed = str(error)
        if bool(failed) != bool(self.last_error):
            log.warning(
                "Reading the keys of the issuer %s: %s", self.config.issuer, failed or "they can be read again."
            )
        self.last_error = failed
        self._ended = number
        read, self._read = self._read, anyio.Event()
        read.set()

    async def newer(self, is_known: Callable[[], bool]) -> bool:
        """Wait until the keys were read again, or `is_known`, but at most some seconds (2); return whether they were.
        Raises IdentityUnavailable if too many tokens wait.
        """
        if self._waiting >= _MAX_WAITING:
            raise IdentityUnavailable(
                "Too many tokens with unknown keys wait until the keys of their issuer are read.", retry_after_s=5.0
            )
        begun = self._begun  # a reading in progress may be too old
        self._waiting += 1
        self._wanted.set()
        try:
            with anyio.move_on_after(_WAIT_S):
                while self._ended <= begun and not is_known():
                    await self._read.wait()
        finally:
            self._waiting -= 1
        return self._ended > begun

    def _use(self, jwks: bytes) -> bool:
        """Use these keys. Return whether they differ from the last ones. Raises ValueError if they are invalid."""
        if jwks == self._jwks:
            return False
        self.keys, self._jwks = parse_jwks(jwks), jwks
        self.revision += 1
        return True


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, content, 0o600)
